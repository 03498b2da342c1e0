"""Sees which of some tensors are read by the operations of a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roundpipe.models.shell import Home


class Reads(TorchDispatchMode):
    """Notes which of some tensors are read by ops while ``reading`` is a set."""

    def __init__(self, homes: Mapping[int, Home]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._homes = homes
        self.reading: set[Home] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and id(leaf) in self._homes:
                self.reading.add(self._homes[id(leaf)])
        return func(*args, **(kwargs or {}))
