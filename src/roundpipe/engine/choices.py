"""Choices that depend on values are made once: in forward, and replayed in recompute.

A router picks experts by the largest of some numbers. If two are nearly equal, a recompute that is
off by one bit (another card, an atomic sum) picks another expert, and its gradient belongs to a
token that never went there. So in forward the indices are noted, in the smallest integer type, and
in recompute the operation is not run: what was chosen is gathered from the recomputed values. This
happens below autograd, which saves the indices it is given, so gradients follow forward's choice.

Noted are operations that pick by comparing floating numbers, and numbers that Python reads from a
tensor (``if x.sum() > 0``), on which it may branch. Not noted are elementwise comparisons, as in
``x > 0``: as many values as the activations themselves, for what repeats bit for bit anyway where
the arithmetic does; and max pooling, where values that are nearly equal are nearly the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Kwargs = Mapping[str, Any]
    Note = tuple[str, Any]  # the operation, what it chose

aten = torch.ops.aten

# Operations that return (values, indices along a dimension): where the dimension stands among the
# arguments and what it is if it is not given.
_ALONG: dict[Any, tuple[int, int]] = {
    aten.topk.default: (2, -1),
    aten.sort.default: (1, -1),
    aten.sort.stable: (2, -1),
    aten.max.dim: (1, -1),
    aten.min.dim: (1, -1),
    aten.kthvalue.default: (2, -1),
    aten.median.dim: (1, -1),
    aten.nanmedian.dim: (1, -1),
    aten.mode.default: (1, -1),
    aten.cummax.default: (1, -1),
    aten.cummin.default: (1, -1),
}
# Operations that return integers alone.
_INTEGERS = frozenset(
    (
        *(aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable),
        *(aten.multinomial.default, aten.searchsorted.Tensor, aten.bucketize.Tensor),
    )
)
_NUMBER = aten._local_scalar_dense.default
_END = "the end"
CHOOSING = frozenset((*_ALONG, *_INTEGERS, _NUMBER))


def chooses(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation picks by floating values, or gives Python one or what follows of one."""
    if func not in CHOOSING:
        return False
    dtype = args[0].dtype
    return bool(dtype.is_floating_point or (func is _NUMBER and dtype is torch.bool))


class Noting:
    """Runs the choices of one layer's forward and notes what they chose.

    ``tell`` is called at each.
    """

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self.notes: list[Note] = []
        self._tell = tell

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Kwargs, run: Callable[[], Any]
    ) -> Any:
        """Run ``func``, which is one of `CHOOSING`, by ``run``."""
        if self._tell is not None:
            self._tell()
        result = run()
        if func is _NUMBER:
            self.notes.append((str(func), result))
        else:
            indices = result[1] if func in _ALONG else result
            narrow = _narrow(indices, _largest(func, args, kwargs))
            self.notes.append((str(func), narrow))
        return result

    def end(self) -> None:
        """The layer has run."""


class Replaying:
    """Gives the choices of one layer's forward again, in the order in which they were made."""

    def __init__(self, notes: list[Note]) -> None:
        self._notes, self._at = notes, 0

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Kwargs, run: Callable[[], Any]
    ) -> Any:
        """What ``func`` chose in forward, with the values that are there now."""
        name, chosen = self._notes[self._at] if self._at < len(self._notes) else (_END, None)
        if name != str(func):
            raise _other_way(str(func), name)
        self._at += 1
        if func is _NUMBER:
            return chosen
        if func is aten.multinomial.default:
            run()  # what is drawn later goes on behind it
        dtype = torch.int32 if kwargs.get("out_int32") else torch.int64
        indices: Tensor = chosen.to(dtype)  # type: ignore[union-attr]
        if func not in _ALONG:
            return indices
        return _gathered(func, args, kwargs, indices), indices

    def end(self) -> None:
        """The layer has run; raises ModelError if it did not come to all choices."""
        if self._at != len(self._notes):
            raise _other_way(_END, self._notes[self._at][0])


def _other_way(here: str, forward: str) -> ModelError:
    return ModelError(
        "recompute goes another way through a layer than its forward went: "
        f"it came to {here}, forward came to {forward}\n"
        "hint: a layer must be a function of its inputs; what it takes from elsewhere must not "
        "change between forward and backward, or goes through save_for_recompute"
    )


def _dim(func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> int:
    place, default = _ALONG[func]
    return int(kwargs.get("dim", args[place] if place < len(args) else default))


def _largest(func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> int:
    """The largest index that may come, or a little more."""
    given = args[1] if func is aten.bucketize.Tensor else args[0]
    if not given.dim():
        return 1
    if func in _ALONG:
        return int(given.shape[_dim(func, args, kwargs)])
    if func in (aten.argmax.default, aten.argmin.default):
        return int(given.numel())  # along one dimension they are fewer
    return int(given.shape[-1])


def _narrow(indices: Tensor, largest: int) -> Tensor:
    """The indices in the smallest integer type that holds them."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return indices.to(dtype)
    return indices


def _gathered(func: Any, args: tuple[Any, ...], kwargs: Kwargs, indices: Tensor) -> Tensor:
    """The values at ``indices``, shaped as the operation gives them."""
    source: Tensor = args[0]
    if not source.dim():
        return source.clone()
    dim = _dim(func, args, kwargs)
    if indices.dim() == source.dim():
        return source.gather(dim, indices)
    return source.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
