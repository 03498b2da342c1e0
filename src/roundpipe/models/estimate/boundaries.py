"""What each layer of a split model is given, at any length, from two short walks.

Most models hand on one hidden state; in others more travels, and less of it from block to block.
A walk through all layers at each length that is counted would take longer than counting. Sizes of
dimensions are constants or go with the length, so two lengths tell all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from roundpipe.models.estimate.amount import Amount
from roundpipe.models.estimate.layer_run import META
from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.models.causal_layers import CausalLMContext
    from roundpipe.models.recording import Split
    from roundpipe.models.shell import TreeShell
    from roundpipe.models.spec import Boundary

_SHORT, _LONG = 24, 40


class Boundaries:
    """See the module docstring. ``shell`` makes a layer's shell on the meta device."""

    def __init__(
        self, split: Split, shell: Callable[[int], TreeShell], context: CausalLMContext
    ) -> None:
        self._split, self._shell, self._context = split, shell, context
        self._short, self._long = self._walk(_SHORT), self._walk(_LONG)

    def at(self, layer: int, length: int) -> Boundary:
        """What ``layer``, not the first, is given of one sequence."""
        short, spec = pytree.tree_flatten(self._short[layer])
        long = pytree.tree_leaves(self._long[layer])
        leaves = [_between(a, b, length) for a, b in zip(short, long, strict=True)]
        return pytree.tree_unflatten(leaves, spec)

    def amount(self, layer: int) -> Amount:
        """How many bytes that is."""
        if layer == 0:
            return Amount()
        lengths = (_SHORT, _LONG, 2 * _LONG)
        return Amount.through(lengths, [_num_bytes(self.at(layer, each)) for each in lengths])

    def _walk(self, length: int) -> list[Boundary]:
        ids = torch.zeros(1, length, dtype=torch.long, device=META)
        inputs = Inputs((), {"input_ids": ids, "labels": ids})
        last = len(self._split.blocks) + 1
        with torch.no_grad():
            boundary = self._shell(0)(None, inputs, None)
            if self._split.flow.is_bare:
                return [None, *[boundary] * last]
            calls = self._context(inputs, range(1, last))
            found: list[Boundary] = [None, boundary]
            for index in range(1, last):
                boundary = self._shell(index)(boundary, inputs, calls)
                found.append(boundary)
        return found


def _between(short: object, long: object, length: int) -> object:
    """A leaf of a boundary at ``length``, from what it is at the two lengths that were walked."""
    if not isinstance(short, Tensor) or not isinstance(long, Tensor):
        return short
    shape = [
        a + (b - a) * (length - _SHORT) // (_LONG - _SHORT)
        for a, b in zip(short.shape, long.shape, strict=True)
    ]
    return torch.empty(shape, dtype=short.dtype, device=META)


def _num_bytes(boundary: Boundary) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(boundary) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
