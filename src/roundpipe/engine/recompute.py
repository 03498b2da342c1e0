"""What the forward of a layer hands to its recompute, and what users may hand on in it.

A layer that is recomputed runs twice: forward without a graph, and again with one before backward.
Both runs must see the same thing where the bits alone do not make sure of it. So the first may
*keep* a tree of tensors and plain values; it comes down to the host with the boundaries and up
again with the input of the recompute, on whatever device that runs::

    F --kept--> a --host--> A --kept--> R

Kept are the choices that forward made (`roundpipe.engine.choices`), the buffers as they were before
it (`roundpipe.engine.state`), and what the user's own code saves with `save_for_recompute`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Saved = tuple[Any, ...]
"""What one call of `save_for_recompute` was given."""


class Saving:
    """The forward of one layer whose recompute is to come; collects what it saves, in order."""

    def __init__(self) -> None:
        self.saved: list[Saved] = []
        self._versions: list[tuple[Tensor, int]] = []

    def save(self, data: Saved) -> None:
        """Keep ``data`` without a graph."""

        def cut(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                raise ModelError(
                    "save_for_recompute was given a tensor that wants a gradient\n"
                    "hint: save what it was computed from, or tensor.detach()"
                )
            self._versions.append((tensor, tensor._version))
            return tensor.detach()

        self.saved.append(pytree.tree_map_only(torch.Tensor, cut, data))

    def end(self) -> None:
        """The layer has run; raises ModelError if it wrote to what it had saved."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "a tensor was written to after save_for_recompute had been given it\n"
                "hint: save_for_recompute(tensor.clone())"
            )
        self._versions.clear()


class Repeating:
    """The recompute of one layer, with what its forward saved."""

    def __init__(self, saved: list[Saved]) -> None:
        self._saved, self._num_read = saved, 0

    def read(self) -> Saved:
        """What the next call of `save_for_recompute` was given; of a single one always that."""
        if len(self._saved) == 1:
            return self._saved[0]
        if self._num_read == len(self._saved):
            raise ModelError(
                "get_recompute_data: forward has saved no more than was read: "
                f"{self._num_read}\nhint: save_for_recompute(…) in the same order in forward"
            )
        self._num_read += 1
        return self._saved[self._num_read - 1]


_SCOPE: ContextVar[Saving | Repeating | None] = ContextVar("roundpipe layer run", default=None)


@contextmanager
def running(scope: Saving | Repeating | None) -> Iterator[None]:
    """Let what runs inside find ``scope``: the forward or the recompute of one layer."""
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def save_for_recompute(*data: Any) -> None:
    """Keep ``data`` for the recompute of the layer whose forward is running.

    Any tree of tensors and plain values. They go to host memory until then, in the order of the
    device's work: nothing blocks. `get_recompute_data` gives them back as a tuple. Does nothing
    where no recompute will follow: in the stage that runs forward, loss and backward at once, in a
    pass without gradient, in the recompute itself, in plain PyTorch.

    A layer whose forward calls this repeats its choices itself: the indices of its own top-k and
    the like are not replayed. Raises ModelError for a tensor that wants a gradient; one that is
    written to afterwards fails the layer.
    """
    scope = _SCOPE.get()
    if isinstance(scope, Saving):
        scope.save(data)


def doing_recompute() -> bool:
    """Whether a layer runs for the second time, to make the activations that backward needs."""
    return isinstance(_SCOPE.get(), Repeating)


def get_recompute_data() -> Saved:
    """What this layer's forward gave to `save_for_recompute`, on the device that recomputes.

    A layer that saves several times reads as often, in the same order. Raises ModelError outside of
    a recompute, and where forward has saved nothing.
    """
    scope = _SCOPE.get()
    if not isinstance(scope, Repeating):
        raise ModelError("get_recompute_data outside of a recompute\nhint: if doing_recompute(): …")
    return scope.read()
