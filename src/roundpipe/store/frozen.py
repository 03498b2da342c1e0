"""A layer's frozen weights that lie in a segment of their own: mapped from a file, or packed.

Frozen weights are only ever read, so they may stay where loading put them: in a file that is mapped
into memory (the kernel brings pages in as they are uploaded and drops them again), or in 4 bits.
The layer's own segment then holds what is left: what is trained, and buffers.

    own weights segment     base segment (read-only)            borrowed
    +-----------------+   +-------------------------------+   +----------+
    | adapters        |   | frozen weights, packed or not |   | tied     |      slot_layout
    +-----------------+   +-------------------------------+   +----------+

A base names its tensors as the file or the loader did; a layer names them as they hang in the model
now (``peft`` renames modules). Tensors are matched as objects. What is trained later is copied into
the own segment and leaves the base; a base that nothing is left of is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from roundpipe.store.packed import PackedTensor
from roundpipe.store.segment import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

    import torch
    from torch import Tensor

    from roundpipe.store.packed import Packed
    from roundpipe.store.segment import Segment, Slice

    LetGo = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Base:
    """Frozen tensors in a segment.

    ``tensors``: the user's tensor objects by the name of their first entry in ``segment.layout``. A
    tensor that is not in ``packed`` is a view of its entry; a packed one is a stand-in without
    memory, of the shape and dtype it has when unpacked. ``let_go(low, high)``: says that bytes of
    the segment were read and need not stay in memory; a base that has it may not be written to.
    """

    segment: Segment
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    let_go: LetGo | None = None


def packed_in(bases: Iterable[Base]) -> dict[Tensor, PackedTensor]:
    """The packed values of the stand-ins in ``bases``."""
    return {
        base.tensors[entry]: PackedTensor(packed, base.segment.views)
        for base in bases
        for entry, packed in base.packed.items()
    }


class UploadPiece(NamedTuple):
    """``num_bytes`` of ``source`` (uint8, host) go to byte ``offset`` of the layer's slot.

    ``let_go(low, high)``, where there is one, is to be told bytes of ``source`` that were copied.
    """

    source: Tensor
    offset: int
    num_bytes: int
    let_go: LetGo | None = None


class Stored(NamedTuple):
    """One entry of a slot and where its bytes lie on the host."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: Tensor
    offset: int
    num_bytes: int
    let_go: LetGo | None

    @classmethod
    def at(cls, place: Slice, buffer: Tensor, name: str, let_go: LetGo | None = None) -> Stored:
        """The entry ``name`` at ``place`` of ``buffer``."""
        return cls(name, place.shape, place.dtype, buffer, place.offset, place.num_bytes, let_go)


class Holding:
    """What one layer keeps in a base, by the layer's names.

    A tensor that was given other memory since (``parameter.data = …``; adapters that take their
    first values out of the weights do so) is not kept: it is an ordinary one.
    """

    def __init__(self, base: Base, tensors: Mapping[str, Tensor]) -> None:
        entries = {id(t): entry for entry, t in base.tensors.items() if _is_there(base, entry)}
        self.base = base
        self._entries = {n: entries[id(t)] for n, t in tensors.items() if id(t) in entries}
        self.packed = {
            name: replace(base.packed[entry], parts=base.packed[entry].part_names(name))
            for name, entry in self._entries.items()
            if entry in base.packed
        }
        order = [name for name, _ in sorted(self._entries.items(), key=self._offset)]
        self._entries = {name: self._entries[name] for name in order}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are kept, in the order in which they lie."""
        return tuple(self._entries)

    def stored(self, name: str) -> list[Stored]:
        """The entries of one tensor: several of a packed one."""
        entry = self._entries[name]
        if name not in self.packed:
            return [self._at(entry, name)]
        theirs, ours = self.base.packed[entry].parts, self.packed[name].parts
        found = [self._at(theirs[role], ours[role]) for role in theirs]
        return sorted(found, key=lambda stored: stored.offset)

    def view(self, name: str) -> Tensor:
        """The bytes of a tensor that is not packed, as that tensor."""
        return self.base.segment.views[self._entries[name]]

    def parts(self, name: str) -> dict[str, Tensor]:
        """The parts of a packed tensor, by the entries that ``packed`` names."""
        theirs, ours = self.base.packed[self._entries[name]].parts, self.packed[name].parts
        return {ours[role]: self.base.segment.views[theirs[role]] for role in theirs}

    def without(self, names: Set[str]) -> Holding | None:
        """What is left when ``names`` have left; None if nothing is."""
        left = {n: self.base.tensors[e] for n, e in self._entries.items() if n not in names}
        return Holding(self.base, left) if left else None

    def _at(self, entry: str, name: str) -> Stored:
        segment = self.base.segment
        return Stored.at(segment.layout.by_name[entry], segment.buffer, name, self.base.let_go)

    def _offset(self, item: tuple[str, str]) -> int:
        return self.base.segment.layout.by_name[item[1]].offset


def _is_there(base: Base, entry: str) -> bool:
    """Whether a tensor still lies where its base has it."""
    if entry in base.packed:
        return True
    tensor, view = base.tensors[entry], base.segment.views[entry]
    place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return place == (view.data_ptr(), view.dtype, view.shape, view.stride())


def pieces(stored: Sequence[Stored], places: Mapping[str, Slice]) -> Iterator[UploadPiece]:
    """The copies that bring ``stored`` to ``places``: one for each run of bytes without a gap.

    With the padding behind the last entry, so that the copies of a slot add up to its bytes.
    """
    for run in _runs(stored):
        first, last = run[0], run[-1]
        num_bytes = min(_end(last), first.buffer.numel()) - first.offset
        source = first.buffer.narrow(0, first.offset, num_bytes)
        let_go = _shifted(first.let_go, first.offset)
        yield UploadPiece(source, places[first.name].offset, num_bytes, let_go)


def _runs(stored: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Entries that follow each other on the host as they will in a slot."""
    run: list[Stored] = []
    for entry in stored:
        if run and not _follows(run[-1], entry):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _follows(before: Stored, entry: Stored) -> bool:
    return entry.buffer is before.buffer and entry.offset == _end(before)


def _end(stored: Stored) -> int:
    return -(-(stored.offset + stored.num_bytes) // ALIGNMENT) * ALIGNMENT


def _shifted(let_go: LetGo | None, offset: int) -> LetGo | None:
    if let_go is None or offset == 0:
        return let_go
    return lambda low, high: let_go(low + offset, high + offset)
