"""Packed weights become weights for as long as a layer runs, and again when its backward asks.

A packed parameter is a frozen leaf of the unpacked shape and dtype that holds no memory. Right
before a layer's forward it gets its weights, right after it lets go of them. Autograd would keep
them for backward, with them the memory that packing saved; instead it keeps a *handle*, which says
of which weights it saved a view, and unpacks them again at each use:

    forward     |unpack|--- F.linear(x, W) ---|let go|     autograd saves: handle of W
    backward                                               |unpack| g @ W |let go|

So at most one layer's unpacked weights are there in forward, and one use's in backward. The parts
are those of the slot the layer was bound to; a visit's slot stays as it is until its last backward.
Memory is new each time: whoever holds a tensor longer than he tells autograd finds it unchanged.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from torch import Tensor, nn

    from roundpipe.store.packed import PackedTensor


@dataclass(frozen=True, eq=False)
class _Source:
    """Weights that can be made again, in the dtype in which a layer wants them."""

    packed: PackedTensor
    dtype: torch.dtype

    def unpack(self) -> Tensor:
        return self.packed.unpack(self.dtype)


@dataclass(frozen=True, eq=False)
class _Handle:
    """What autograd keeps in place of a view of unpacked weights."""

    source: _Source
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        return self.source.unpack().as_strided(self.shape, self.stride, self.offset)


class _Hooks:
    """Saves handles for views of ``sources``, by address; the rest goes to the hooks around."""

    def __init__(self, sources: Mapping[int, _Source]) -> None:
        self._sources = sources
        # torch asks only the innermost hooks, so those of who weighs a layer have to be asked here.
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._around: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = around

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and tensor.numel():
            source = self._sources.get(tensor.untyped_storage().data_ptr())
            if source is not None and tensor.dtype == source.dtype:
                offset = int(tensor.storage_offset())
                return _Handle(source, tuple(tensor.shape), tensor.stride(), offset)
        return tensor if self._around is None else self._around[0](tensor)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Handle):
            return kept.view()
        found: Tensor = kept if self._around is None else self._around[1](kept)
        return found


class Unpacking:
    """The packed parameters of one shell. ``dtypes``: of those wanted in another than their own."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._bound: dict[str, tuple[nn.Parameter, _Source]] = {}
        self._apart: set[int] = set()  # leaves by id; the shell keeps them
        self._empty: dict[str, Tensor] = {}  # what a leaf is while its layer does not run

    def clear(self) -> None:
        """Forget what is bound."""
        self._bound.clear()

    def bind(self, name: str, leaf: nn.Parameter, packed: PackedTensor) -> None:
        """Have ``leaf`` get its weights from ``packed`` from now on."""
        source = _Source(packed, self._dtypes.get(name, packed.packed.dtype))
        empty = self._empty.get(name)
        if empty is None:
            device = next(iter(packed.tensors.values())).device
            value = torch.full((), float("nan"), dtype=source.dtype, device=device)
            empty = self._empty[name] = value.expand(packed.packed.shape)
        leaf.data = empty
        self._bound[name] = (leaf, source)

    def within(self, module: nn.Module) -> None:
        """Have the weights below ``module`` there only while it runs, not while the shell does."""
        below = {id(parameter) for parameter in module.parameters()}
        running = ExitStack()

        def enter(*_: Any) -> None:
            names = {name for name, (leaf, _) in self._bound.items() if id(leaf) in below}
            running.enter_context(self._there(names))

        def leave(*_: Any) -> None:
            running.close()

        self._apart |= below
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Have all weights there inside; what autograd saves of them inside are handles."""
        if not self._bound:
            yield
            return
        with self._there(
            {n for n, (leaf, _) in self._bound.items() if id(leaf) not in self._apart}
        ):
            yield

    @contextmanager
    def _there(self, names: Set[str]) -> Iterator[None]:
        sources = {}
        try:
            for name in names:
                leaf, source = self._bound[name]
                leaf.data = source.unpack()
                sources[leaf.untyped_storage().data_ptr()] = source
            hooks = _Hooks(sources)
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                yield
        finally:
            for name in names:
                self._bound[name][0].data = self._empty[name]
