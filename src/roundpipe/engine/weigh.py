"""Weighs a microbatch: what autograd keeps of each layer, and what layers hand to each other.

While a layer runs, everything that autograd saves passes by. Storages are counted once for a visit:
what a layer saves of its output the next one saves as its input. Weights are not counted; they lie
in their slot. Nothing is copied and nothing waits, so a weighed microbatch takes little longer and
gives the same bits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


@dataclass
class Sizes:
    """Bytes by layer, of the heaviest microbatch seen. Several devices may weigh at a time."""

    boundary: dict[int, int] = field(default_factory=dict)  # what the layer reads from below
    kept: dict[int, int] = field(default_factory=dict)  # by autograd, from forward to backward
    largest: dict[int, int] = field(default_factory=dict)  # one tensor of that
    work: dict[int, int] = field(default_factory=dict)  # what the layer says it took for a moment


class Scale:
    """Weighs one microbatch of one visit into ``sizes``; ``own`` is memory that is not counted."""

    def __init__(self, sizes: Sizes, own: Iterable[Tensor | None]) -> None:
        self._sizes = sizes
        self._seen = {_address(tensor) for tensor in own if tensor is not None}
        self._kept: dict[int, int] = {}  # of this microbatch: a layer may be weighed in parts

    @contextmanager
    def layer(self, layer: int, boundary: Any = None) -> Iterator[None]:
        """Weigh what runs inside as part of a layer, and the boundary that it reads."""
        read = [leaf for leaf in pytree.tree_leaves(boundary) if isinstance(leaf, torch.Tensor)]
        if read:
            _raise_to(self._sizes.boundary, layer, sum(leaf.nbytes for leaf in read))
        saved: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and _address(tensor) not in self._seen:
                self._seen.add(_address(tensor))
                saved.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _same):
            yield
        if torch.is_grad_enabled():
            self._kept[layer] = self._kept.get(layer, 0) + sum(saved)
            _raise_to(self._sizes.kept, layer, self._kept[layer])
            _raise_to(self._sizes.largest, layer, max(saved, default=0))

    def note_work(self, layer: int, num_bytes: int) -> None:
        """Count what a layer took for a moment and has given back."""
        _raise_to(self._sizes.work, layer, num_bytes)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _raise_to(sizes: dict[int, int], layer: int, num_bytes: int) -> None:
    sizes[layer] = max(sizes.get(layer, 0), num_bytes)
