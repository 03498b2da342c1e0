"""Makes the losses that microbatches report the loss of the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.engine.call import set_loss, total_loss
from roundpipe.models.loss import IGNORED, count_trained_tokens, scale_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def weigh_losses(
    outputs: list[Any],
    samples: Sequence[int],
    labels: Sequence[Tensor] | None = None,
    *,
    is_shifted: bool = False,
) -> None:
    """Change ``outputs`` so that the mean of their losses is the batch's, in place.

    A loss is a tensor without dimension: it is weighed by ``samples`` of its microbatch. With
    ``labels`` the field ``loss`` is a mean over tokens whose label is not -100, and becomes the
    mean over all of them. ``is_shifted``: the first label of a sequence is never used.
    """
    if labels is not None and all(_has_loss(output) for output in outputs):
        counts = [_trained(label, is_shifted=is_shifted) for label in labels]
        total = max(sum(counts), 1)
        shares = [
            scale_loss(output.loss, count / total)
            for output, count in zip(outputs, counts, strict=True)
        ]
        set_loss(outputs, total_loss(shares))
    mean = sum(samples) / len(samples)
    if any(size != mean for size in samples):
        for at, size in enumerate(samples):
            outputs[at] = _scaled(outputs[at], size / mean, but=getattr(outputs[at], "loss", None))


def _has_loss(output: Any) -> bool:
    loss = getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor) and loss.dim() == 0


def _trained(label: Tensor, *, is_shifted: bool) -> int:
    if label.is_floating_point():
        return label.shape[0]
    return count_trained_tokens(label) if is_shifted else int((label != IGNORED).sum())


def _scaled(tree: Any, factor: float, *, but: Any) -> Any:
    """Every floating tensor of a tree that has no dimension times a factor."""

    def one(leaf: Any) -> Any:
        is_loss = isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()
        return leaf * factor if is_loss and leaf is not but else leaf

    return pytree.tree_map(one, tree)
