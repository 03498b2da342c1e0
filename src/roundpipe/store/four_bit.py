"""Weights that bitsandbytes has packed already: its ``Params4bit``, taken as they are.

The bytes and their state move into a base segment, and the parameter and its state are pointed at
them, so the user's module works on the same memory. Two of their habits matter:

- A ``Linear4bit`` that runs in evaluation on a CPU with AVX512 *repacks* its weights, for a faster
  kernel. What comes out has lost bits of its scales and means something else. Such a parameter is
  refused; and no worker ever runs a ``Linear4bit``'s own forward (`roundpipe.models.four_bit`).
- Their state keeps code tables beside the scales. They are always the same two, which is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ModelError
from roundpipe.store.frozen import Base
from roundpipe.store.packed import DATA, SCALES, Packed, PackedTensor, has_usual_codes, part_name
from roundpipe.store.segment import Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def is_params4bit(tensor: Tensor) -> bool:
    """Whether a tensor is a 4-bit parameter of bitsandbytes; imports nothing."""
    return type(tensor).__name__ == "Params4bit"


def unpacked_form(tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor; those that it has when unpacked, of a ``Params4bit``."""
    state = tensor.quant_state if is_params4bit(tensor) else None
    if state is None:
        return tuple(tensor.shape), tensor.dtype
    return tuple(state.shape), _compute_dtype(tensor)


def _compute_dtype(tensor: Any) -> torch.dtype:
    """In which dtype its module computes: bitsandbytes unpacks straight to that."""
    dtype: torch.dtype | None = getattr(tensor.module, "compute_dtype", None)
    return dtype or tensor.quant_state.dtype


def packed_params4bit(name: str, tensor: Any) -> PackedTensor:
    """See how a ``Params4bit`` is packed; its parts are views of its own memory.

    Raises ModelError for one that is not quantised yet or was repacked for evaluation.
    """
    state = tensor.quant_state
    if state is None or not tensor.bnb_quantized:
        raise ModelError(
            f"not quantised yet: {name}\nhint: move the model to the CPU first: model.to('cpu')"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"repacked by bitsandbytes when it ran in evaluation, which lost bits: {name}\n"
            "hint: load the model again and wrap it before anything runs it in eval()"
        )
    if not has_usual_codes(state) or (state.nested and state.state2.blocksize != SCALES):
        raise ModelError(
            f"quantised with a code of its own: {name}\nhint: quantise the model with "
            "bitsandbytes 0.43 or newer"
        )
    parts = {DATA: tensor.data.contiguous().view(torch.uint8).view(-1), "scales": state.absmax}
    if state.nested:
        parts |= {"scales_of_scales": state.state2.absmax, "offset": state.offset.view(1)}
    names = {role: part_name(name, role) for role in parts}
    form = unpacked_form(tensor)
    packed = Packed(*form, names, state.quant_type, state.blocksize)
    return PackedTensor(packed, {names[role]: part for role, part in parts.items()})


@torch.no_grad()
def move_into_base(tensors: Mapping[str, Tensor]) -> Base:
    """Copy ``Params4bit`` into one segment and point them at it, one at a time."""
    found = {name: packed_params4bit(name, tensor) for name, tensor in tensors.items()}
    segment = Segment(
        Layout.of(
            (entry, tuple(part.shape), part.dtype)
            for each in found.values()
            for entry, part in each.tensors.items()
        )
    )
    packed = {}
    for name in tensors:
        each = found.pop(name)
        for entry, part in each.tensors.items():
            segment.views[entry].copy_(part)
        packed[name] = each.packed
        _point(tensors[name], {r: segment.views[e] for r, e in each.packed.parts.items()})
    return Base(segment, tensors, packed)


def _point(tensor: Any, parts: Mapping[str, Tensor]) -> None:
    """Have a ``Params4bit`` and its state read these parts."""
    tensor.data = parts[DATA].view(tensor.dtype).view(tensor.shape)
    state = tensor.quant_state
    state.absmax = parts["scales"]
    if state.nested:
        state.state2.absmax = parts["scales_of_scales"]
        state.offset = parts["offset"].view(())
