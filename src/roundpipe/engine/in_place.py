"""Lets layers write to their input, as ``nn.ReLU(inplace=True)`` does.

What a layer is given may be read again: a boundary is saved for recompute, and where a gradient is
wanted it is a leaf, which autograd lets nobody write to. So a layer that writes gets a copy. Which
ones do shows at their first run, by the version counters that torch keeps of every tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roundpipe.models.spec import Boundary, Inputs

Given = tuple["Boundary", "Inputs", Any]
"""A layer's boundary, the call's inputs, the context."""


class InPlace:
    """Knows of each layer whether it writes to what it is given; of one device, one thread."""

    def __init__(self) -> None:
        self._writes: dict[int, bool] = {}

    def run(self, layer: int, shell: Callable[..., Boundary], given: Given) -> Boundary:
        """Run ``shell`` on ``given``, which is as before afterwards."""
        known = self._writes.get(layer)
        if known is False:
            return shell(*given)
        boundary, inputs, context = given
        copies: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            copies.append(tensor.clone())
            return copies[-1]

        boundary, args, kwargs = pytree.tree_map_only(
            torch.Tensor, copied, (boundary, inputs.args, inputs.kwargs)
        )
        versions = [copy._version for copy in copies]
        result = shell(boundary, replace(inputs, args=args, kwargs=kwargs), context)
        if known is None:
            now = [copy._version for copy in copies]
            self._writes[layer] = now != versions
        return result
