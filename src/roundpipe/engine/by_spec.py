"""Cut and join trees as the markers of ``torch.distributed.pipelining.microbatch`` say.

A spec is a tree of the same form as what it is for, or of its upper part: ``TensorChunkSpec(dim)``
cuts or joins along a dimension, ``_Replicate`` stands for what goes whole to every microbatch, or
comes out alike of each, and ``_CustomReducer`` folds what comes out. Markers are known by their
names: importing them takes longer than a step.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CHUNK, _WHOLE, _REDUCER = "TensorChunkSpec", "_Replicate", "_CustomReducer"


def marker_of(spec: Any) -> str | None:
    """The name of the marker that ``spec`` is; both ``_Replicate`` and ``_Replicate()`` are one."""
    kind = spec if isinstance(spec, type) else type(spec)
    names = {each.__name__ for each in kind.__mro__}  # torch's own sum_reducer is of a subclass
    return next((name for name in (_CHUNK, _WHOLE, _REDUCER) if name in names), None)


def cut_by_spec(
    tree: Any, spec: Any, count: int, automatic: Callable[[Any], list[Any]]
) -> list[Any]:
    """``count`` pieces of ``tree``; where ``spec`` is None, as ``automatic`` cuts.

    Raises ConfigError where the two do not match.
    """
    if spec is None:
        return automatic(tree)
    marker = marker_of(spec)
    if marker == _WHOLE:
        return [tree] * count
    if marker == _CHUNK:
        return _chunks(tree, spec.split_dim, count)
    if isinstance(spec, (list, tuple)) and isinstance(tree, (list, tuple)):
        _require_same(len(spec) == len(tree), spec, tree)
        columns = [
            cut_by_spec(part, one, count, automatic) for part, one in zip(tree, spec, strict=True)
        ]
        return [_like(tree, [column[at] for column in columns]) for at in range(count)]
    if isinstance(spec, dict) and isinstance(tree, dict):
        _require_same(spec.keys() <= tree.keys(), spec, tree)
        named = {
            key: cut_by_spec(part, spec.get(key), count, automatic) for key, part in tree.items()
        }
        return [{key: column[at] for key, column in named.items()} for at in range(count)]
    raise _mismatch(spec, tree)


def join_by_spec(parts: Sequence[Any], spec: Any, automatic: Callable[[Sequence[Any]], Any]) -> Any:
    """What microbatches returned, put together; where ``spec`` is None, as ``automatic`` does."""
    first = parts[0]
    if spec is None:
        return automatic(parts)
    marker = marker_of(spec)
    if marker == _WHOLE:
        return first
    if marker == _CHUNK:
        return torch.cat(list(parts), dim=spec.split_dim)
    if marker == _REDUCER:
        return reduce(spec.reduce_fn, parts, spec.init_value)
    if isinstance(spec, (list, tuple)) and isinstance(first, (list, tuple)):
        _require_same(len(spec) == len(first), spec, first)
        columns = zip(*parts, strict=True)
        joined = [
            join_by_spec(column, one, automatic) for column, one in zip(columns, spec, strict=True)
        ]
        return _like(first, joined)
    if isinstance(spec, dict) and isinstance(first, dict):
        _require_same(spec.keys() <= first.keys(), spec, first)
        joined_by_name = {
            key: join_by_spec([part[key] for part in parts], spec.get(key), automatic)
            for key in first
        }
        return joined_by_name if type(first) is dict else type(first)(joined_by_name)
    raise _mismatch(spec, first)


def _chunks(tensor: Any, dim: int, count: int) -> list[Any]:
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(
            f"cannot be cut along dimension {dim}: {_named(tensor)}\n"
            "hint: _Replicate for what every microbatch gets whole"
        )
    if tensor.shape[dim] < count:
        raise ConfigError(
            f"cannot be cut into {count} along dimension {dim}: {_named(tensor)}\n"
            f"hint: num_microbatch={max(tensor.shape[dim], 1)}"
        )
    return list(tensor.tensor_split(count, dim=dim))


def _like(tree: Any, values: list[Any]) -> Any:
    """``values`` in a list or tuple of the kind that ``tree`` is."""
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*values)
    return type(tree)(values)


def _require_same(is_same: bool, spec: Any, tree: Any) -> None:
    if not is_same:
        raise _mismatch(spec, tree)


def _mismatch(spec: Any, tree: Any) -> ConfigError:
    return ConfigError(
        f"a spec does not have the form of what it is for: {spec!r} for {_named(tree)}\n"
        "hint: one marker for each tensor, or None to leave a part to the automatic rule"
    )


def _named(tree: Any) -> str:
    if isinstance(tree, torch.Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    if isinstance(tree, dict):
        return f"a dict of {list(tree)}"
    if isinstance(tree, (list, tuple)):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"
