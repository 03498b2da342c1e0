"""Cut a batch into microbatches, and put what comes out together again.

Inputs and labels are cut by the same rule and travel together. A tensor whose first dimension is
the batch is cut along it; everything else goes to every microbatch as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import ConfigError
from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.config import RoundPipeRunConfig

DEFAULT_NUM_MICROBATCH = 8  # at most; fixed, so that results do not depend on the devices


@dataclass(frozen=True)
class Microbatch:
    """One piece of a batch, on the host."""

    inputs: Inputs
    label: Any
    num_samples: int


def batch_size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Length of the first dimension of the first tensor that has one. Raises ConfigError."""
    for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            if leaf.shape[0] == 0:
                raise ConfigError(f"the batch is empty: a tensor of shape {tuple(leaf.shape)}")
            return leaf.shape[0]
    raise ConfigError("no tensor with a batch dimension among the inputs")


def sizes(batch_size: int, num_microbatch: int) -> list[int]:
    """Samples of each microbatch: as even as can be, larger ones first, none empty."""
    count = min(batch_size, num_microbatch)
    small, extra = divmod(batch_size, count)
    return [small + (i < extra) for i in range(count)]


def split(
    args: Sequence[Any], kwargs: Mapping[str, Any], label: Any, num_microbatch: int | None
) -> list[Microbatch]:
    """Cut a call into at most ``num_microbatch`` microbatches, fewer when samples are fewer."""
    if num_microbatch is not None and num_microbatch < 1:
        raise ConfigError(f"num_microbatch must be at least 1: {num_microbatch}")
    batch_size = batch_size_of(args, kwargs)
    lengths = sizes(batch_size, num_microbatch or DEFAULT_NUM_MICROBATCH)
    parts, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        args_, kwargs_, label_ = _cut((tuple(args), dict(kwargs), label), piece, batch_size)
        parts.append(Microbatch(Inputs(args_, kwargs_), label_, length))
        start += length
    return parts


def rows_of(microbatch: Microbatch) -> int:
    """How many vectors go through each matrix of a model: tokens, or samples of features."""
    rows = 1
    for leaf in pytree.tree_leaves((microbatch.inputs.args, microbatch.inputs.kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            has_features = leaf.is_floating_point() and leaf.dim() > 1
            width = max(leaf.shape[-1], 1) if has_features else 1
            rows = max(rows, leaf.numel() // width)
    return rows


def _cut(tree: Any, piece: slice, batch_size: int) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size:
            return leaf[piece]
        return leaf

    return pytree.tree_map(cut, tree)


def merge(outputs: Sequence[Any]) -> Any:
    """Put the outputs of all microbatches together: tensors are joined along the batch.

    Tensors without dimension (losses) are left out of the joining: the first one stands for all,
    so callers put the right value there. Values that are not tensors are the first microbatch's.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(column) for column in columns], spec)


def joined(outputs: Sequence[Any], config: RoundPipeRunConfig) -> Any:
    """The outputs of a call as its config wants them: joined or listed, on which device."""
    together = outputs if config.merge_output is False else merge(outputs)
    if config.output_device is None:
        return together
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(config.output_device), together)


def _join(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return first
    longest = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in column), strict=True)]
    if any(list(leaf.shape[1:]) != longest for leaf in column):
        raise ConfigError(
            "outputs of the microbatches have different shapes: "
            f"{[tuple(leaf.shape) for leaf in column]}\n"
            "hint: merge_output=False gives them as a list"
        )
    return torch.cat(column)
