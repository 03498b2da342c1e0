"""Frozen weights in 4 bits: how they lie in a segment, and how they become weights again.

    data               two weights a byte, in blocks of 64 that share a scale
    scales             one a block: 8 bits, or 32 without double quantisation
    scales_of_scales   32 bits for 256 scales, with double quantisation
    offset             what was subtracted from the scales before they were quantised

(NF4 and double quantisation: Dettmers et al. 2023, QLoRA, section 3.) The arithmetic is that of
``bitsandbytes``, to the bit, so its checkpoints are taken as they are. It is imported where it is
used, never before.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from roundpipe.store.segment import Entry

Kind = Literal["nf4", "fp4"]
BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share one of theirs: the only number bitsandbytes knows
DATA = "data"
_PIECE = 1 << 24  # weights quantised at a time; a multiple of every block


@dataclass(frozen=True)
class Packed:
    """How one tensor is packed.

    ``parts``: by role (``data``, ``scales``, ``scales_of_scales``, …) the entry of the segment that
    holds it. ``shape`` and ``dtype`` are those of the tensor when unpacked.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, str]
    kind: Kind = "nf4"
    block: int = BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor when unpacked."""
        return prod(self.shape) * self.dtype.itemsize

    def part_names(self, name: str) -> dict[str, str]:
        """What ``parts`` is for a tensor called ``name``: its data has the tensor's own name."""
        return {role: part_name(name, role) for role in self.parts}

    def _rows_of_blocks(self) -> torch.Size:
        """A shape in which every row is whole blocks.

        bitsandbytes (0.50) unpacks row by row on the CPU, and takes wrong scales where a block goes
        on in the next row: where the last dimension is no multiple of the block.
        """
        count = prod(self.shape)
        return torch.Size((count,) if count % self.block else (count // self.block, self.block))

    @torch.no_grad()
    def unpack(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Make the weights of ``tensors``, which holds the parts by entry, on their device.

        Launches work and waits for nothing. ``dtype``: in place of the packed tensor's own.
        """
        functional = _bitsandbytes()
        parts = {role: tensors[entry] for role, entry in self.parts.items()}
        offset, nested = None, None
        if "scales_of_scales" in parts:
            offset = parts["offset"].view(())
            nested = functional.QuantState(
                parts["scales_of_scales"],
                code=_scale_code(parts[DATA].device),
                blocksize=SCALES,
                dtype=torch.float32,
            )
        state = functional.QuantState(
            parts["scales"],
            self._rows_of_blocks(),
            blocksize=self.block,
            quant_type=self.kind,
            dtype=dtype or self.dtype,
            offset=offset,
            state2=nested,
        )
        weights: Tensor = functional.dequantize_4bit(parts[DATA].view(-1, 1), state)
        return weights.view(self.shape)


class PackedTensor(NamedTuple):
    """A packed tensor at one place: how it is packed, and its parts there by entry."""

    packed: Packed
    tensors: Mapping[str, Tensor]

    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        """Make the weights, where the parts are: see `Packed.unpack`."""
        return self.packed.unpack(self.tensors, dtype)


def part_name(name: str, role: str) -> str:
    """The entry of one part of the tensor ``name``: its data has the tensor's own name."""
    return name if role == DATA else f"{name}.{role}"


def packed_entries(
    name: str, count: int, *, double: bool = True, block: int = BLOCK
) -> Iterator[Entry]:
    """The segment entries of a tensor of ``count`` weights, in the order in which they lie."""
    blocks = ceil(count / block)
    yield part_name(name, DATA), (ceil(count / 2),), torch.uint8
    yield part_name(name, "scales"), (blocks,), torch.uint8 if double else torch.float32
    if double:
        scales = ceil(blocks / SCALES)
        yield part_name(name, "scales_of_scales"), (scales,), torch.float32
        yield part_name(name, "offset"), (1,), torch.float32


@torch.no_grad()
def pack(
    name: str, tensor: Tensor, *, kind: Kind = "nf4", double: bool = True, block: int = BLOCK
) -> tuple[Packed, dict[str, Tensor]]:
    """Quantise a 16- or 32-bit tensor of any number of dimensions; returns its parts by entry.

    ``double``: quantise the scales too. Gives the bits of quantising all of it at once, but works
    in pieces, because bitsandbytes takes a dozen bytes a weight meanwhile. Raises ModelError for
    values that are not finite.
    """
    functional = _bitsandbytes()
    flat = tensor.detach().reshape(-1)
    parts = {
        entry: torch.empty(shape, dtype=dtype, device=flat.device)
        for entry, shape, dtype in packed_entries(name, flat.numel(), double=double, block=block)
    }
    scales = torch.empty(ceil(flat.numel() / block), device=flat.device)
    for low in range(0, flat.numel(), _PIECE):
        piece = flat[low : low + _PIECE]
        data, state = functional.quantize_4bit(piece, blocksize=block, quant_type=kind)
        parts[name].narrow(0, low // 2, data.numel()).copy_(data.view(-1))
        scales.narrow(0, low // block, state.absmax.numel()).copy_(state.absmax)
    if not scales.isfinite().all():
        raise ModelError(
            f"weights that are not finite cannot be packed: {name}\nhint: check the files"
        )
    if double:
        offset = scales.mean()
        scales, state = functional.quantize_blockwise(scales - offset, blocksize=SCALES)
        parts[part_name(name, "scales_of_scales")].copy_(state.absmax)
        parts[part_name(name, "offset")].fill_(offset)
    parts[part_name(name, "scales")].copy_(scales)
    roles = {DATA if entry == name else entry[len(name) + 1 :]: entry for entry in parts}
    return Packed(tuple(tensor.shape), tensor.dtype, roles, kind, block), parts


def cannot_train(name: str) -> ModelError:
    """Make the error for packed weights that require a gradient: 4 bits are too few to train."""
    return ModelError(
        f"weights in 4 bits cannot be trained: {name}\n"
        "hint: freeze them and train adapters (finetuning_type=qlora), or load the model without "
        "quantization"
    )


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Import ``bitsandbytes`` inside, or what imports it, without its word on a missing kernel.

    On CPUs with AVX512 it warns that a faster kernel for inference, which is not used here, cannot
    be downloaded.
    """
    told = logging.getLogger("bitsandbytes.backends.cpu.ops")
    told.addFilter(_is_of_use)
    try:
        yield
    finally:
        told.removeFilter(_is_of_use)


def _bitsandbytes() -> Any:
    """``bitsandbytes.functional``, imported at first use."""
    if "bitsandbytes" not in sys.modules:
        with quiet_bitsandbytes():
            importlib.import_module("bitsandbytes")
    return importlib.import_module("bitsandbytes.functional")


def _is_of_use(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in record.msg


def has_usual_codes(state: Any) -> bool:
    """Whether a ``QuantState`` means by its codes what this module means."""
    usual = _bitsandbytes().get_4bit_type(state.quant_type, device=state.code.device)
    if not torch.equal(state.code.float(), usual):
        return False
    return not state.nested or torch.equal(state.state2.code, _scale_code(state.code.device))


@functools.cache
def _scale_code(device: torch.device) -> Tensor:
    """The 256 values of an 8-bit scale; made once a device, as bringing them there waits for it."""
    code: Tensor = _bitsandbytes().create_dynamic_map().to(device)
    return code
