"""What a run of the model as it is tells of its blocks: how they are called, what they pass on.

Tensors are followed by identity: what one block returned and another one gets is passed on, and
the hidden state is the first thing that a block returns and the next one gets. Objects that blocks
get are compared before and after each block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundpipe.errors import ModelError
from roundpipe.models import paths
from roundpipe.models.blocks import BlockCall, BlockForm
from roundpipe.models.collecting import active
from roundpipe.models.packet import BlockFlow, Flow
from roundpipe.models.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from roundpipe.models.paths import Path


@dataclass(eq=False)
class _Object:
    """A thing that blocks get and may write to. ``pure``: as it was when first seen."""

    value: Any
    pure: Any
    number: int
    is_written: bool = False
    read_by: set[Hashable] = field(default_factory=set)  # kinds of blocks


class Seen:
    """Notes each block's call and what came back; see the module docstring."""

    def __init__(self) -> None:
        self.calls: list[BlockCall] = []
        self.outputs: list[Any] = []
        self.takes: list[dict[Path, str]] = []
        self._gives: list[dict[int, str]] = []
        self._given: list[list[tuple[Path, _Object]]] = []  # objects, by block
        self._objects: dict[int, _Object] = {}  # by id
        self._made: dict[int, tuple[int, int]] = {}  # by id: the block and the place in its output
        self._before: tuple[dict[int, int], list[Any]] = ({}, [])
        self._hidden: int | str | None = None
        self.between: set[int] = set()  # blocks that get another hidden state than was returned
        self._kinds: list[Hashable] = []
        self._put: dict[int, _Object] = {}  # by id of a tensor: the object that it was put into
        self._collector: dict[str, list[Any]] = {}  # of the forward that runs
        self._starts: list[dict[str, int]] = []  # how much it held when each block was called
        self._alive: list[Any] = []  # so that no id is given again
        self._reads: Reads | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Hashable) -> None:
        """Note the call of the next block."""
        if self.outputs:
            self._follow_hidden(args, kwargs)
        if not self._kinds:
            self._collector = {k: v for k, v in active().items() if isinstance(v, list)}
        self._starts.append({key: len(each) for key, each in self._collector.items()})
        self._kinds.append(kind)
        self.calls.append(BlockCall(args, kwargs))
        self._follow_others(args, kwargs)
        self._given.append(list(self._objects_of(args, kwargs)))
        versions = {id(t): t._version for _, t in paths.tensors((args, kwargs))}
        self._before = versions, [paths.copied(each.value) for _, each in self._given[-1]]
        if self._put:
            self._reads = Reads(self._put)
            self._reads.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, output: Any) -> None:
        """Note what the block returned and wrote."""
        self.close()
        call = self.calls[-1]
        versions, before = self._before
        for path, tensor in paths.tensors((call.args, call.kwargs)):
            if tensor._version != versions.get(id(tensor), tensor._version):
                raise ModelError(
                    "a block writes into a tensor that it is called with, which is not supported: "
                    f"{paths.named(path[1:])}"
                )
        for (_, each), old in zip(self._given[-1], before, strict=True):
            for value in paths.changes(old, each.value).values():
                each.is_written = True
                self._alive.append(value)
                self._put.update({id(tensor): each for _, tensor in paths.tensors(value)})
        hidden = _first(output)
        if not isinstance(hidden, Tensor):
            raise ModelError(
                "a block returns neither a tensor nor a tuple that begins with one: "
                f"{type(output).__name__}"
            )
        index = len(self.outputs)
        self.outputs.append(output)
        self._gives.append({})
        for position, each in enumerate(output if isinstance(output, (tuple, list)) else [output]):
            if isinstance(each, Tensor):
                self._made[id(each)] = (index, position)

    def close(self) -> None:
        """End what watches the block that runs."""
        if self._reads is not None:
            reads, self._reads = self._reads, None
            reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for each in reads.reading:
                each.read_by.add(self._kinds[-1])

    def pass_on(self, kind: Hashable) -> Callable[..., Any]:
        """What a block of ``kind`` does that is not run: let the hidden state through.

        What it returns beside that is like what a block of its kind returned that was run.
        """

        def called(_block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            like = self._kinds.index(kind)
            if like >= len(self.outputs):
                raise ModelError("its blocks are not called in the order of their list")
            form = self._form(self.outputs[like])
            packed = form.pack(form.hidden_of(args, kwargs))
            if not isinstance(packed, (tuple, list)):
                return packed
            more = [t.clone() if isinstance(t, Tensor) else t for t in self.outputs[like][1:]]
            return type(packed)([packed[0], *more])

        return called

    def forms(self) -> list[BlockForm]:
        """How each block takes the hidden state and gives it back."""
        return [self._form(output) for output in self.outputs]

    def pure_calls(self) -> list[BlockCall]:
        """The calls without hidden state, their objects as they were before any block wrote."""
        found = []
        for call, form, given in zip(self.calls, self.forms(), self._given, strict=True):
            bare = form.with_hidden(call, None)
            pure = {path: each.pure for path, each in given if each.is_written}
            found.append(BlockCall(*paths.replaced((bare.args, dict(bare.kwargs)), pure)))
        return found

    def collected(self) -> list[dict[str, list[Any]]]:
        """What hooks collected while each block ran, once the forward has ended."""
        ends = [*self._starts[1:], {key: len(each) for key, each in self._collector.items()}]
        return [
            {key: each[start[key] : end[key]] for key, each in self._collector.items()}
            for start, end in zip(self._starts, ends, strict=True)
        ]

    def flow(self, kinds: Sequence[Hashable]) -> Flow:
        """What travels from block to block; ``kinds`` of the blocks, in order.

        A block reads an object if one of its kind was seen to.
        """
        uses: dict[str | int, int] = {}
        for index, taken in enumerate(self.takes):
            uses.update(dict.fromkeys(taken.values(), index))
        written = [each for each in self._objects.values() if each.is_written]
        for each in written:
            reading = [i for i, kind in enumerate(kinds) if kind in each.read_by]
            uses.update({each.number: max(reading)} if reading else {})
        blocks = [
            BlockFlow(takes, gives, {path: o.number for path, o in given if o.is_written})
            for takes, gives, given in zip(self.takes, self._gives, self._given, strict=True)
        ]
        return Flow(blocks, uses)

    def _form(self, output: Any) -> BlockForm:
        is_many = isinstance(output, (tuple, list))
        place = self._hidden
        if place is None:
            place = 0 if self.calls and self.calls[0].args else "hidden_states"
        return BlockForm(place, len(output) if is_many else None, isinstance(output, list))

    def _follow_hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = _first(self.outputs[-1])
        places: list[int | str] = [i for i, value in enumerate(args) if value is before]
        places += [key for key, value in kwargs.items() if value is before]
        if not places:
            self.between.add(len(self.calls))
            return
        if len(places) != 1 or self._hidden not in (None, places[0]):
            raise ModelError(
                "a block gets the hidden state in several places, or not where others do: "
                f"block {len(self.calls)}"
            )
        self._hidden = places[0]

    def _follow_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken: dict[Path, str] = {}
        last = len(self.outputs) - 1
        for path, tensor in paths.tensors((args, kwargs)):
            made = self._made.get(id(tensor))
            if made is not None and made != (last, 0) and id(tensor) not in self._put:
                key = f"{made[0]} > {made[1]}"
                self._gives[made[0]][made[1]] = key
                taken[path] = key
        self.takes.append(taken)

    def _objects_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[Path, _Object]]:
        found: list[tuple[Path, _Object]] = []
        for path, value in (
            *(((("item", 0), ("item", i)), each) for i, each in enumerate(args)),
            *(((("item", 1), ("item", key)), each) for key, each in kwargs.items()),
        ):
            if paths.is_mutable(value):
                new = _Object(value, paths.copied(value), len(self._objects))
                found.append((path, self._objects.setdefault(id(value), new)))
        return found


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


def reached(tensor: Tensor, leaves: Mapping[int, Any]) -> set[Any]:
    """Those of the leaves, by their ids, that a tensor's graph goes back to."""
    if id(tensor) in leaves:
        return {leaves[id(tensor)]}
    pending, done, found = [tensor.grad_fn], set(), set()
    while pending:
        node = pending.pop()
        if node is None or node in done:
            continue
        done.add(node)
        leaf = leaves.get(id(getattr(node, "variable", None)))
        if leaf is not None:
            found.add(leaf)
        pending += [each for each, _ in node.next_functions]
    return found
