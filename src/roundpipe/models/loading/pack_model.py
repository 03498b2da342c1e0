"""Packs a model that is in memory already, as loading packs one that comes from files.

For what no reader of ours opens (GGUF): transformers makes it whole, in 16 or 32 bits, and its
blocks are packed one matrix at a time, each matrix's memory being released before the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roundpipe.models.find_blocks import find_blocks
from roundpipe.models.packable import packable
from roundpipe.models.shell import TensorNames, placeholder
from roundpipe.store.frozen import Base
from roundpipe.store.packed import Packed, pack, packed_entries
from roundpipe.store.segment import Layout, Segment

if TYPE_CHECKING:
    from torch import Tensor, nn

_CPU = torch.device("cpu")


@torch.no_grad()
def pack_model(model: nn.Module) -> list[Base]:
    """Pack the matrices of a model's blocks in place, as NF4; returns the bases that hold them.

    The packed parameters are frozen stand-ins without memory from then on. Takes seconds a billion
    weights, and the memory of one matrix beside the model. Raises ModelError for a model without
    repeated blocks, and for weights that are not finite.
    """
    names, seen = TensorNames(model), set[int]()
    bases = []
    for block in find_blocks(model)[1]:
        own = {names.of(p): p for p in packable(block) if id(p) not in seen}
        seen.update(map(id, own.values()))
        if own:
            bases.append(_packed(own))
    return bases


def _packed(parameters: dict[str, Tensor]) -> Base:
    segment = Segment(
        Layout.of(
            entry
            for name, parameter in parameters.items()
            for entry in packed_entries(name, parameter.numel())
        )
    )
    packed: dict[str, Packed] = {}
    for name, parameter in parameters.items():
        packed[name], parts = pack(name, parameter)
        for entry, part in parts.items():
            segment.views[entry].copy_(part)
        parameter.requires_grad_(False)
        parameter.data = placeholder(parameter, _CPU, "nan")
    return Base(segment, parameters, packed)
