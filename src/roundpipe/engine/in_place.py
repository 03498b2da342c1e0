"""Lets layers write to their input, as ``nn.ReLU(inplace=True)`` does.

What a layer is given may be read again: a boundary is saved for recompute, and where a gradient is
wanted it is a leaf, which autograd lets nobody write to. So a layer that writes gets a copy. Which
ones do shows at their first run, by the version counters that torch keeps of every tensor. One that
begins to write only later has spoilt what others read: that is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roundpipe.models.spec import Boundary, Inputs

Given = tuple["Boundary", "Inputs", Any]
"""A layer's boundary, the call's inputs, the context."""


def run_unspoilt(
    run: Callable[..., Boundary], given: Given, *, writes: bool | None
) -> tuple[Boundary, bool]:
    """Run a layer on ``given``, which is as before afterwards; whether the layer writes to it.

    ``writes``: what is known of that. Raises ModelError if it is known not to, and does.
    """
    boundary, inputs, context = given
    if writes is False:
        before = _versions(boundary)
        result = run(*given)
        if _versions(boundary) != before:
            raise ModelError(
                "a layer writes to its input, and did not when it first ran\n"
                "hint: x = x.clone() before it writes"
            )
        return result, False
    copies: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    boundary, args, kwargs = pytree.tree_map_only(
        torch.Tensor, copied, (boundary, inputs.args, inputs.kwargs)
    )
    before = _versions(copies)
    result = run(boundary, replace(inputs, args=args, kwargs=kwargs), context)
    return result, bool(writes) or _versions(copies) != before


def _versions(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):  # as nearly every boundary is
        return tree._version
    return [leaf._version for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
