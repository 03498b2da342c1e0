"""Cut a batch into microbatches, and put what comes out together again.

Inputs and labels are cut by the same rule and travel together. A tensor whose first dimension is
the batch is cut along it; everything else goes to every microbatch as it is. A caller may give a
rule of their own: a spec (`roundpipe.engine.by_spec`) or a function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.engine.by_spec import cut_by_spec, join_by_spec
from roundpipe.engine.rows import is_second
from roundpipe.errors import ConfigError, DeviceError
from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.config import RoundPipeRunConfig

DEFAULT_NUM_MICROBATCH = 8  # at most; fixed, so that results do not depend on the devices


class RoundPipePackedData(list[Any]):
    """One value of each microbatch, in order: a leaf of what a call returns unmerged.

    Given to another call, each of its microbatches gets the value of the same number.
    """

    def synchronize(self) -> None:
        """Return at once: a call returns when its results are on the host."""


@dataclass(frozen=True)
class Microbatch:
    """One piece of a batch, on the host."""

    inputs: Inputs
    label: Any
    num_samples: int


@dataclass(frozen=True)
class Cut:
    """How a call is cut: into at most how many, and by which rules if not the automatic one."""

    num_microbatch: int | None = None
    split_input: Any = None
    split_label: Any = None


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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    label: Any,
    cut: int | Cut | None = None,
) -> list[Microbatch]:
    """Cut a call into microbatches: at most as many as asked for, fewer when samples are fewer.

    Where a rule was given there are exactly as many. Raises ConfigError for what cannot be cut.
    """
    how = cut if isinstance(cut, Cut) else Cut(cut)
    if how.num_microbatch is not None and how.num_microbatch < 1:
        raise ConfigError(f"num_microbatch must be at least 1: {how.num_microbatch}")
    packed = {
        len(leaf)
        for leaf in pytree.tree_leaves((tuple(args), dict(kwargs), label))
        if isinstance(leaf, RoundPipePackedData)
    }
    if len(packed) > 1:
        raise ConfigError(f"packed arguments are of different numbers of microbatches: {packed}")
    if packed or how.split_input is not None:
        return _split_as_told(args, kwargs, label, how, next(iter(packed), None))
    batch_size = batch_size_of(args, kwargs)
    lengths = sizes(batch_size, how.num_microbatch or DEFAULT_NUM_MICROBATCH)
    pieces = _pieces((tuple(args), dict(kwargs)), lengths)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and is_second(name, value, batch_size):
            for (_, named), piece in zip(pieces, torch.split(value, lengths, dim=1), strict=True):
                named[name] = piece
    labels = _labels(label, how, lengths)
    return [
        Microbatch(Inputs(*piece), label_, length)
        for piece, label_, length in zip(pieces, labels, lengths, strict=True)
    ]


def _split_as_told(
    args: Sequence[Any], kwargs: Mapping[str, Any], label: Any, how: Cut, packed: int | None
) -> list[Microbatch]:
    """As a function, a spec, or arguments that come in pieces already, say."""
    count = packed or how.num_microbatch or DEFAULT_NUM_MICROBATCH

    def automatic(tree: Any) -> list[Any]:
        return _evenly(tree, count)

    if callable(how.split_input):
        given = how.split_input(tuple(args), dict(kwargs), count)
        parts = _checked_parts(given)
    else:
        specs = how.split_input or (None, None)
        if not isinstance(specs, tuple) or len(specs) != 2:
            raise ConfigError(
                f"split_input must be a function or (args spec, kwargs spec): {specs!r}\n"
                "hint: ((TensorChunkSpec(0), _Replicate), None)"
            )
        parts = list(
            zip(
                cut_by_spec(tuple(args), specs[0], count, automatic),
                cut_by_spec(dict(kwargs), specs[1], count, automatic),
                strict=True,
            )
        )
    lengths = [_samples(part) for part in parts]
    labels = _labels(label, how, lengths)
    return [
        Microbatch(Inputs(tuple(args_), dict(kwargs_)), label_, length)
        for (args_, kwargs_), label_, length in zip(parts, labels, lengths, strict=True)
    ]


def _checked_parts(given: Any) -> list[tuple[Any, Any]]:
    try:
        all_args, all_kwargs = given
        parts = list(zip(all_args, all_kwargs, strict=True))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "split_input must return two lists of one length: arguments and keyword arguments of "
            f"each microbatch\nhint: return [(x0,), (x1,)], [{{}}, {{}}] ({error})"
        ) from error
    if not parts:
        raise ConfigError("split_input returned no microbatch")
    return parts


def _labels(label: Any, how: Cut, lengths: Sequence[int]) -> list[Any]:
    rule, count = how.split_label, len(lengths)
    if callable(rule) and not isinstance(rule, type):
        labels = list(rule(label, count))
    elif rule is not None:
        labels = cut_by_spec(label, rule, count, lambda tree: _evenly(tree, count))
    else:
        labels = _pieces(label, lengths)
    if len(labels) != count:
        raise ConfigError(f"split_label returned {len(labels)} labels for {count} microbatches")
    return labels


def _samples(part: Any) -> int:
    try:
        return batch_size_of(*part)
    except ConfigError:
        return 1


def rows_of(microbatch: Microbatch) -> int:
    """How many vectors go through each matrix of a model: tokens, or samples of features."""
    rows = 1
    for leaf in pytree.tree_leaves((microbatch.inputs.args, microbatch.inputs.kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            has_features = leaf.is_floating_point() and leaf.dim() > 1
            width = max(leaf.shape[-1], 1) if has_features else 1
            rows = max(rows, leaf.numel() // width)
    return rows


def _pieces(tree: Any, lengths: Sequence[int]) -> list[Any]:
    """``tree`` in pieces of so many samples."""
    batch_size = sum(lengths)
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]

    def cut(at: int) -> Callable[[Any], Any]:
        piece = slice(ends[at] - lengths[at], ends[at])

        def one(leaf: Any) -> Any:
            if isinstance(leaf, RoundPipePackedData):
                return leaf[at]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size:
                return leaf[piece]
            return leaf

        return one

    return [pytree.tree_map(cut(at), tree) for at in range(len(lengths))]


def _evenly(tree: Any, count: int) -> list[Any]:
    """``tree`` in ``count`` pieces: its batch is that of its first tensor long enough for them."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] >= count:
            return _pieces(tree, sizes(leaf.shape[0], count))
    return _pieces(tree, [0] * count)


def merge(outputs: Sequence[Any]) -> Any:
    """Put the outputs of all microbatches together: tensors are joined along the batch.

    Tensors without dimension (losses) are averaged. What is no tensor must be the same in all.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(column) for column in columns], spec)


def config_of_call(given: RoundPipeRunConfig, default: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """What a call is told, over what its model is; raises DeviceError for an absent device."""
    config = given.over(default)
    if config.output_device is not None:
        try:
            torch.empty(0, device=config.output_device)
        except (AssertionError, RuntimeError, TypeError) as error:  # as torch was built
            reason = str(error).partition("\n")[0]
            raise DeviceError(
                f"output_device cannot be used: {config.output_device} ({reason})\n"
                'hint: output_device="cpu"'
            ) from error
    return config


def joined(outputs: Sequence[Any], config: RoundPipeRunConfig) -> Any:
    """The outputs of a call as its config wants them, on its device.

    In memory of their own: what they lie in is used again as soon as nobody holds it, and a copy to
    a card that the caller has put on a stream holds nothing.
    """
    together = _together(outputs, config.merge_output)
    ours = {id(leaf) for leaf in pytree.tree_leaves(list(outputs))}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, RoundPipePackedData):
            return RoundPipePackedData(move(each) for each in leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        moved = leaf.to(config.output_device or leaf.device)
        return moved.clone() if id(moved) in ours else moved

    return pytree.tree_map(move, together)


def _together(outputs: Sequence[Any], how: Any) -> Any:
    if how is None or how is True:
        return merge(outputs)
    if how is False:
        flat = [pytree.tree_flatten(output) for output in outputs]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([RoundPipePackedData(c) for c in columns], flat[0][1])
    if callable(how) and not isinstance(how, type):
        return how(list(outputs))
    return join_by_spec(outputs, how, merge)


def _join(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        if not all(_is_same(value, first) for value in column):
            raise ConfigError(
                f"microbatches returned different values: {column}\n"
                "hint: merge_output=False gives each microbatch's"
            )
        return first
    if first.dim() == 0:
        is_one = all(value is first for value in column)
        return first if is_one else torch.stack(list(column)).float().mean().to(first.dtype)
    longest = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in column), strict=True)]
    if any(list(leaf.shape[1:]) != longest for leaf in column):
        raise ConfigError(
            "outputs of the microbatches have different shapes: "
            f"{[tuple(leaf.shape) for leaf in column]}\n"
            "hint: merge_output=False gives each microbatch's"
        )
    return torch.cat(column)


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # what cannot be compared is not known to differ
        return True
