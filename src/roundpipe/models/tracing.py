"""Which tensors outside the blocks are read when, and what blocks get that has a gradient.

The model runs with stand-ins that let the hidden state through, gradients on, every op watched.
Each stand-in passes on a leaf of its own, so the graph of whatever arrives at a later block tells
whether weights alone went into it, or what blocks returned, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.models import paths
from roundpipe.models.blocks import BlockCall, StandIns
from roundpipe.models.collecting import active
from roundpipe.models.packet import Between
from roundpipe.models.reads import Reads
from roundpipe.models.seen import reached
from roundpipe.models.shell import Home, TensorNames, TreeCopy
from roundpipe.store.packed import PackedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.models.paths import Path
    from roundpipe.models.seen import Seen


@dataclass
class Outside:
    """What is not in blocks, its values, and which of it is written to."""

    names: TensorNames
    device: torch.device
    homes: Sequence[Home]
    values: Mapping[str, Tensor | PackedTensor]
    rewritten: set[Home]

    def value_of(self, home: Home) -> tuple[Tensor, bool]:
        """What hangs in a place, unpacked, and whether it may have a gradient.

        A tied tensor gets a leaf for each of its places, to tell through which it is read.
        """
        value = self.values[home.name]
        whole = value.unpack() if isinstance(value, PackedTensor) else value.data
        whole = whole.clone() if home in self.rewritten else whole
        return whole, whole.is_floating_point()


@dataclass
class Traced:
    """Who reads what outside the blocks, and what each block takes that has a gradient."""

    before: set[Home] = field(default_factory=set)
    after: set[Home] = field(default_factory=set)
    takes: list[dict[Path, str]] = field(default_factory=list)  # of the prefix, by block
    between: dict[int, Between] = field(default_factory=dict)


def run_traced(
    root: nn.Module,
    of_blocks: tuple[Sequence[nn.Module], Sequence[nn.Module]],
    seen: Seen,
    outside: Outside,
    call: Callable[[nn.Module], Any],
) -> Traced:
    """Let the hidden state through the blocks (called ones, uncalled ones), and watch.

    ``call``: calls a copy of ``root`` with the inputs.
    """
    blocks, uncalled = of_blocks
    tracer = _Tracer(seen, last=len(blocks) - 1)
    stand_ins = StandIns(blocks, tracer.act, uncalled)
    tree = TreeCopy(
        root,
        outside.names,
        outside.device,
        homes=(),
        idle=[(home, "zero") for home in outside.homes],
        stand_ins=stand_ins.modules,
    )
    leaves = [(_hang(tree, home, outside), home) for home in outside.homes]
    tree.module.eval()
    with torch.enable_grad(), tracer.watching(leaves):
        output = call(tree.module)
    stand_ins.require_all_called()
    tracer.end(output)
    return tracer.traced


def _hang(tree: TreeCopy, home: Home, outside: Outside) -> Tensor:
    value, requires_grad = outside.value_of(home)
    return tree.hang(home, value, requires_grad=requires_grad)


class _Tracer:
    """What the stand-ins of a traced run do, and what they see."""

    def __init__(self, seen: Seen, last: int) -> None:
        self.traced = Traced()
        self._seen, self._last = seen, last
        self._forms, self._collected = seen.forms(), seen.collected()
        self._keys: dict[int, tuple[Tensor, str]] = {}
        self._origins: dict[int, int | Home] = {}  # by id: blocks let through, parameters outside
        self._kept: list[Tensor] = []  # so that no id is given again
        self._watched = Reads({})

    def watching(self, leaves: Sequence[tuple[Tensor, Home]]) -> Reads:
        """Watch who reads the tensors that hang outside the blocks."""
        parameters = [(leaf, home) for leaf, home in leaves if home.is_parameter]
        self._origins.update((id(leaf), home) for leaf, home in parameters)
        self._watched = Reads({id(leaf): home for leaf, home in leaves})
        self._watched.reading = self.traced.before
        return self._watched

    def act(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what the block gets and let the hidden state through, as a leaf of its own."""
        form = self._forms[index]
        hidden = form.hidden_of(args, kwargs)
        self._note(index, hidden, form.with_hidden(BlockCall(args, kwargs), None))
        if index == self._last:
            self._watched.reading = self.traced.after
        passed = hidden.detach()
        if passed.is_floating_point():
            passed.requires_grad_()
        self._origins[id(passed)] = index
        self._kept.append(passed)
        for name, each in self._collected[index].items():
            active()[name].extend(each)
        return form.pack(passed)

    def _note(self, index: int, hidden: Tensor, call: BlockCall) -> None:
        is_hidden = index in self._seen.between
        found = reached(hidden, self._origins) if is_hidden else set()
        taken: dict[Path, str] = {}
        made: dict[Path, str] = {}
        for path, leaf in paths.tensors((call.args, dict(call.kwargs))):
            if not leaf.requires_grad or path in self._seen.takes[index]:
                continue
            key = f"{index}: {paths.named(path[1:])}"
            of_leaf = reached(leaf, self._origins)
            if any(isinstance(each, int) for each in of_leaf):
                made[path] = key
                found |= of_leaf
            else:
                taken[path] = self._keys.setdefault(id(leaf), (leaf, key))[1]
        self.traced.takes.append(taken)
        if made or is_hidden:
            self.traced.between[index] = _between(index, found, made, is_hidden=is_hidden)

    def end(self, output: Any) -> None:
        """Note what goes into the model's output."""
        results = [t for key in ("logits", "loss") if isinstance(t := output.get(key), Tensor)]
        found = set().union(*(reached(tensor, self._origins) for tensor in results))
        end = _between(self._last + 1, found, {}, is_hidden=False)
        self.traced.after |= end.homes
        if end.needs:
            self.traced.between[self._last + 1] = end


def _between(
    index: int, origins: set[int | Home], made: dict[Path, str], *, is_hidden: bool
) -> Between:
    """What is computed before block ``index``, from the leaves that it goes back to."""
    return Between(
        {each: f"{each} > 0" for each in origins if isinstance(each, int) and each != index - 1},
        made,
        is_hidden,
        frozenset(each for each in origins if isinstance(each, Home)),
    )
