"""Sees which of some tensors are read by the operations of a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Reads(TorchDispatchMode):
    """Notes in ``reading`` which of some tensors are read by ops: what each is, by its id."""

    def __init__(self, what: Mapping[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self.reading: set[Any] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and id(leaf) in self._what:
                self.reading.add(self._what[id(leaf)])
        return func(*args, **(kwargs or {}))
