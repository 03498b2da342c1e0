"""Contiguous host memory that holds many tensors, so that moving them is one copy.

A `Layout` says where each tensor lies in a run of bytes; it knows nothing of memory. The same
layout views a host segment and a device slot, so an upload copies bytes without looking at what
they mean and may be cut anywhere. Every tensor starts at a multiple of 256 bytes: enough for every
dtype, for vector loads and for what device allocators promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Self

import torch

from roundpipe.store.pages import Block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

ALIGNMENT = 256

Entry = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Slice:
    """One tensor's place in a layout; ``offset`` is a multiple of 256, both counts are bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Slices in order without overlap, and the bytes they take, rounded up to 256."""

    slices: tuple[Slice, ...]
    num_bytes: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        """Lay out ``(name, shape, dtype)`` entries in the order given; each name once."""
        return cls((), 0).followed_by(entries)

    def followed_by(self, entries: Iterable[Entry], *, alignment: int = ALIGNMENT) -> Self:
        """Lay out more entries behind these, which keep their offsets.

        ``alignment``: of the new ones' ends, a multiple of 256 bytes.
        """
        slices, offset = list(self.slices), self.num_bytes
        for name, shape, dtype in entries:
            num_bytes = prod(shape) * dtype.itemsize
            slices.append(Slice(name, tuple(shape), dtype, offset, num_bytes))
            offset = _aligned(offset + num_bytes, alignment)
        layout = type(self)(tuple(slices), offset)
        assert len(layout.by_name) == len(slices), f"a name twice in {[s.name for s in slices]}"
        return layout

    def prefix(self, num_slices: int) -> Self:
        """The layout of the first ``num_slices``, at the same offsets."""
        slices = self.slices[:num_slices]
        end = _aligned(slices[-1].offset + slices[-1].num_bytes) if slices else 0
        return type(self)(slices, end)

    @cached_property
    def by_name(self) -> dict[str, Slice]:
        """The slices by name, in order."""
        return {s.name: s for s in self.slices}

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order."""
        return tuple(self.by_name)

    @property
    def entries(self) -> Iterator[Entry]:
        """What ``of`` would have to be given to make this layout."""
        return ((s.name, s.shape, s.dtype) for s in self.slices)

    def view(self, buffer: Tensor, *, at: int = 0) -> dict[str, Tensor]:
        """View ``num_bytes`` of a uint8 ``buffer``, from byte ``at`` on, as this layout's tensors.

        Copies nothing; host or device; about 1 us a tensor.
        """
        whole = buffer.narrow(0, at, self.num_bytes)
        typed = {dtype: whole.view(dtype) for dtype in self._dtypes}
        start = {dtype: base.storage_offset() for dtype, base in typed.items()}
        return {
            name: typed[dtype].as_strided(shape, stride, start[dtype] + element)
            for name, shape, stride, dtype, element in self._places
        }

    @cached_property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dict.fromkeys(s.dtype for s in self.slices))

    @cached_property
    def _places(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, int]]:
        """(name, shape, stride, dtype, first element): worked out once, views are made often."""
        return [
            (s.name, s.shape, _row_major(s.shape), s.dtype, s.offset // s.dtype.itemsize)
            for s in self.slices
        ]


class Segment:
    """One host buffer of exactly ``layout.num_bytes``, and the typed views into it.

    ``buffer``: memory that is there already (a mapped file), in place of new; ``block`` is then
    None, else the pages that hold the buffer and nothing else.
    """

    def __init__(self, layout: Layout, *, buffer: Tensor | None = None) -> None:
        self.layout = layout
        self.block = None
        if buffer is None:
            self.block = Block(layout.num_bytes)
            buffer = self.block.tensor
        self.buffer = buffer
        self.views = layout.view(self.buffer)

    def __repr__(self) -> str:
        return f"Segment({len(self.layout.slices)} tensors, {self.layout.num_bytes} bytes)"


def _aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
