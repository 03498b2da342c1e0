"""What flows from block to block of a causal LM: the hidden state, and what travels beside it.

    [prefix] --h, a--> [block 0] --h, a, k--> [block 1] --h, k--> [block 2] --h--> [suffix]
             a: an argument that the prefix computes       k: what block 0 leaves for block 2

Most models pass on nothing but the hidden state, and then that tensor alone is the boundary. What
travels beside it was found in the recording run (`roundpipe.models.recording`):

- *carried* arguments: tensors that the prefix computes from weights (inputs of each layer beside
  the hidden state) or drops out some of in training (positions), and what a block returns beside
  the hidden state for a later block;
- *written* things: what a block puts into an object that it is called with, and a later one reads;
- *collected* things: outputs that hooks inside blocks collect for the model's own forward.

Each travels until its last reader has run. Blocks never share an object: each gets containers of
its own, with the tensors that came along put in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from roundpipe.models import paths
from roundpipe.models.blocks import BlockCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roundpipe.models.blocks import BlockForm
    from roundpipe.models.paths import Path
    from roundpipe.models.shell import Home
    from roundpipe.models.spec import Boundary


class Packet(NamedTuple):
    """The boundary between two blocks. Nothing in it is ever changed.

    ``written``: by the number of the object, what was put where. ``collected``: by the output's
    name, for each block so far, what its hooks collected.
    """

    hidden: Tensor
    carried: Mapping[str, Tensor] = {}
    written: Mapping[int, Mapping[Path, Any]] = {}
    collected: Mapping[str, Sequence[Sequence[Any]]] = {}

    @classmethod
    def of(cls, boundary: Boundary) -> Packet:
        """The packet that a boundary is, or stands for."""
        return boundary if isinstance(boundary, cls) else cls(boundary)

    def boundary(self) -> Boundary:
        """The hidden state alone, if nothing else is there."""
        is_bare = not (self.carried or self.written or self.collected)
        return self.hidden if is_bare else self


@dataclass(frozen=True)
class BlockFlow:
    """What one block's call has beside the hidden state that came from elsewhere, and who gives it.

    ``takes``: keys of what is carried, by the place in ``(args, kwargs)``; ``gives``: keys of
    outputs, by their position in what the block returns; ``objects``: the numbers of the objects
    that blocks write to, by place.
    """

    takes: Mapping[Path, str] = field(default_factory=dict)
    gives: Mapping[int, str] = field(default_factory=dict)
    objects: Mapping[Path, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Between:
    """What the model's own code computes from outputs of blocks, right before it calls a block.

    ``needs``: keys of the hidden states that it reads, by the block that returned them; ``args``:
    keys of the arguments it computes, by place; ``is_hidden``: whether it changes the hidden state
    itself; ``homes``: parameters outside the blocks that it reads.
    """

    needs: Mapping[int, str] = field(default_factory=dict)
    args: Mapping[Path, str] = field(default_factory=dict)
    is_hidden: bool = False
    homes: frozenset[Home] = frozenset()


@dataclass(frozen=True)
class Flow:
    """What travels beside the hidden state, learned in the recording run.

    ``last_uses``: the last block that takes what has a key, or reads an object of a number.
    ``between``: by block; what comes after the last has the number of blocks.
    """

    blocks: Sequence[BlockFlow]
    last_uses: Mapping[str | int, int] = field(default_factory=dict)
    between: Mapping[int, Between] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        """Whether nothing travels but what hooks collect."""
        return not self.last_uses

    def from_prefix(self) -> dict[int, Mapping[Path, str]]:
        """What the prefix must compute, by the block in whose call it is found first."""
        known = {key for block in self.blocks for key in block.gives.values()}
        known.update(key for each in self.between.values() for key in each.args.values())
        found: dict[int, Mapping[Path, str]] = {}
        for index, block in enumerate(self.blocks):
            new = {path: key for path, key in block.takes.items() if key not in known}
            if new:
                found[index] = new
                known.update(new.values())
        return found

    def taking(self, more: Sequence[Mapping[Path, str]]) -> Flow:
        """The same with more that the prefix computes, by block."""
        blocks = [
            replace(block, takes={**block.takes, **each})
            for block, each in zip(self.blocks, more, strict=True)
        ]
        uses = dict(self.last_uses)
        for index, each in enumerate(more):
            uses.update(dict.fromkeys(each.values(), index))
        return replace(self, blocks=blocks, last_uses=uses)

    def computing(self, between: Mapping[int, Between]) -> Flow:
        """The same with what is computed between blocks."""
        blocks, uses = list(self.blocks), dict(self.last_uses)
        for index, each in sorted(between.items()):
            for maker, key in each.needs.items():
                blocks[maker] = replace(blocks[maker], gives={**blocks[maker].gives, 0: key})
                uses[key] = max(index, uses.get(key, 0))
            if each.args:
                blocks[index] = replace(blocks[index], takes={**blocks[index].takes, **each.args})
                uses.update(dict.fromkeys(each.args.values(), index))
        return Flow(blocks, uses, between)

    def layer_of(self, index: int) -> int:
        """The layer that block ``index`` is: after the prefix, and what is computed between."""
        return 1 + index + sum(each <= index for each in self.between)

    @property
    def num_layers(self) -> int:
        """Prefix, blocks, what is computed between them, suffix."""
        last = len(self.blocks)
        return self.layer_of(last - 1) + 2

    def call(self, index: int, call: BlockCall, packet: Packet) -> BlockCall:
        """The call that the context rebuilt, with what came along, in objects of its own."""
        block = self.blocks[index]
        if not (block.takes or block.objects):
            return call
        given = (call.args, dict(call.kwargs))
        new: dict[Path, Any] = {path: packet.carried[key] for path, key in block.takes.items()}
        for path, number in block.objects.items():
            fresh = paths.copied(paths.get(given, path))
            new[path] = paths.replaced(fresh, packet.written.get(number, {}))
        return BlockCall(*paths.replaced(given, new))

    def written(self, index: int, before: BlockCall, after: BlockCall) -> dict[int, Any]:
        """What a block has put into its objects since ``before`` was `copied` of its call."""
        found = {}
        for path, number in self.blocks[index].objects.items():
            pair = [paths.get((c.args, c.kwargs), path) for c in (before, after)]
            if change := paths.changes(*pair):
                found[number] = change
        return found

    def snapshot(self, index: int, call: BlockCall) -> BlockCall:
        """The objects of a call as they are now, for `written`."""
        if not self.blocks[index].objects:
            return call
        given = (call.args, dict(call.kwargs))
        found = {p: paths.copied(paths.get(given, p)) for p in self.blocks[index].objects}
        return BlockCall(*paths.replaced(given, found))

    def after(
        self, index: int, packet: Packet, output: tuple[BlockForm, Any], written: Mapping[int, Any]
    ) -> Packet:
        """What flows on when a block has returned: the new, and the old that is still read."""
        form, returned = output
        carried = dict(packet.carried)
        for position, key in self.blocks[index].gives.items():
            carried[key] = returned[position] if position else form.unpack(returned)
        objects = {number: dict(each) for number, each in packet.written.items()}
        for number, change in written.items():
            objects.setdefault(number, {}).update(change)
        return Packet(
            form.unpack(returned),
            {key: each for key, each in carried.items() if self._is_read(key, index)},
            {number: each for number, each in objects.items() if self._is_read(number, index)},
            packet.collected,
        )

    def _is_read(self, key: str | int, index: int) -> bool:
        return self.last_uses.get(key, -1) > index
