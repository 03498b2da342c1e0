"""Tensors as files hold them, read as the weights that they stand for, piece by piece.

fp8     weight * scale of its block
mxfp4   a value of four bits * 2 ** (scale - 127), 32 values a scale    (OCP MX 1.0, 5.3)
nf4     see `roundpipe.store.packed`; can also be taken as it is
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from roundpipe.models.loading.shards import FileTensor
    from roundpipe.store.packed import Packed

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus sign
_ROWS = 1 << 22  # elements that are unpacked at a time, about


class Stored(Protocol):
    """A tensor that can be read from files."""

    @property
    def name(self) -> str:
        """Its name in the files."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it has when read."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        ...

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read it in flat consecutive pieces, each in ``dtype``; blocks on the disk."""
        ...

    def fill(self, target: Tensor) -> None:
        """Read it into ``target``: contiguous, of its number of elements; blocks on the disk."""
        ...


@dataclass(frozen=True)
class _Made:
    """A stored tensor that is made piece by piece of others; ``parts`` by role."""

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, FileTensor]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        raise NotImplementedError

    def fill(self, target: Tensor) -> None:
        flat, start = target.view(-1), 0
        for piece in self.pieces(target.dtype):
            flat[start : start + piece.numel()] = piece
            start += piece.numel()
        assert start == flat.numel(), f"{self.name}: {start} {flat.numel()}"

    def _whole(self, role: str) -> Tensor:
        part = self.parts[role]
        tensor = torch.empty(part.shape, dtype=part.dtype)
        part.fill(tensor)
        return tensor


@dataclass(frozen=True)
class Fp8(_Made):
    """Weights of 8 bits with a scale for each ``block`` of rows and columns."""

    block: tuple[int, int]

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read it a few rows of blocks at a time; the product is made in fp32."""
        weight, columns = self.parts["weight"], self.shape[-1]
        scales = _as_numbers(self._whole("scale")).reshape(-1, ceil(columns / self.block[1]))
        rows = prod(self.shape[:-1])
        step = max(1, _ROWS // (columns * self.block[0])) * self.block[0]
        for low, part in _row_pieces(weight, rows, step):
            of_rows = scales[torch.arange(low, low + len(part)) // self.block[0]]
            wide = of_rows.repeat_interleave(self.block[1], dim=1)[:, :columns]
            yield (part.to(torch.float32) * wide).to(dtype).view(-1)


@dataclass(frozen=True)
class MxFp4(_Made):
    """Stacked experts in blocks of 32 values of 4 bits, stored with rows and columns exchanged."""

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read it expert by expert; every value of the format is one of bf16 too."""
        experts, columns, rows = self.shape
        width = self.parts["blocks"].shape[-1]
        values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
        scales = self._whole("scales")
        for expert, codes in _row_pieces(self.parts["blocks"], experts, 1):
            bytes_ = codes.view(rows, -1, width)
            pairs = torch.stack([values[(bytes_ & 15).long()], values[(bytes_ >> 4).long()]], -1)
            exact = torch.ldexp(pairs.flatten(-2), scales[expert].int()[..., None] - 127)
            yield exact.view(rows, columns).to(dtype).t().reshape(-1)


@dataclass(frozen=True)
class BnbFourBit(_Made):
    """A matrix in 4 bits as bitsandbytes saved it."""

    packed: Packed
    offset: float | None  # of the scales, with double quantisation

    def entries(self, name: str, dtype: torch.dtype) -> tuple[Packed, dict[str, Tensor]]:
        """How it is packed and its parts by entry, as ``name`` and to be unpacked in ``dtype``."""
        parts = self.packed.part_names(name)
        tensors = {parts[role]: self._whole(role).view(-1) for role in self.parts}
        if self.offset is not None:
            tensors[parts["offset"]] = torch.tensor([self.offset], dtype=torch.float32)
        packed = replace(self.packed, dtype=dtype, parts=parts)
        return packed, {entry: tensors[entry] for entry in parts.values()}

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Unpack all of it at once, as in the files' own dtype."""
        packed, tensors = self.entries(self.name, self.packed.dtype)
        yield packed.unpack(tensors).to(dtype).view(-1)


def _as_numbers(scales: Tensor) -> Tensor:
    """Scales as fp32; a byte is the exponent of a power of two."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.float32) - 127.0).exp2()
    return scales.to(torch.float32)


def _row_pieces(tensor: FileTensor, rows: int, step: int) -> Iterator[tuple[int, Tensor]]:
    """Read ``step`` of a tensor's ``rows`` at a time: the first row's number, and the rows."""
    width = tensor.num_bytes // rows
    for low in range(0, rows, step):
        count = min(step, rows - low)
        part = tensor.part(low * width, count * width)
        yield low, part.view(count, -1)
