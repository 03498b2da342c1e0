"""Counts what operations do while they run without data, on the meta device.

Three counts, kept apart because they need different things: arithmetic and bytes moved, by sort of
operation; calls, which cost Python's time; and the bytes alive after each of them, in storages that
were made while counting. Views and what writes nothing move nothing.

Meta tensors have shapes, but no values. Code that looks at a value (is this mask all ones? is this
batch packed?) is told yes, and 1: no padding, nothing packed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from roundpipe.models.estimate.profile import EXPERTS, MATRIX, POINTWISE, THIN, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_aten = torch.ops.aten
_SHORT = 128  # a product with a side below this does not fill a device's matrix units

_MAKE_ONLY = frozenset(  # memory that nobody writes
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_LOOK_UP = frozenset(  # read as much as they return, whatever they look it up in
    {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.slice_scatter}
)
_INTO_WIDER = frozenset({_aten.addmm.dtype, _aten.addmm.dtype_out})
_FILL = frozenset(  # look at no element of what they are given
    {
        _aten.copy_,
        _aten.zero_,
        _aten.fill_,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
    }
)


@dataclass
class Tally:
    """What operations of one sort did."""

    flops: int = 0
    moved: int = 0
    kernels: int = 0


@dataclass
class Counts:
    """What ran while counting. ``alive``: bytes after each operation that made memory."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    calls: int = 0
    alive: list[int] = field(default_factory=list)

    def tally(self, sort: str) -> Tally:
        """What was counted of one sort."""
        return self.tallies.get(sort, Tally())

    def note(self, sort: str, *, flops: int, moved: int) -> None:
        """Count one operation."""
        tally = self.tallies.setdefault(sort, Tally())
        tally.flops += flops
        tally.moved += moved
        tally.kernels += 1


class Answering(TorchDispatchMode):
    """Answers questions about the values of meta tensors: see the module docstring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _answer(args[0].dtype)
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        if func is _aten._grouped_mm.default and args[0].is_meta:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


class Meter(Answering):  # type: ignore[no-untyped-call]
    """Counts what runs under it. ``outside``: tensors whose memory is not counted.

    Used for one run: memory that was made under it counts for as long as it lives.
    """

    def __init__(self, outside: Iterable[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.counts = Counts()
        self._dtype = dtype
        self._outside = {_key(tensor): tensor for tensor in outside}
        self._alive: dict[int, tuple[Any, int]] = {}
        self._num_alive = 0  # bytes

    @property
    def num_alive(self) -> int:
        """Bytes in storages made so far that are still alive."""
        return self._num_alive

    def restart(self) -> Counts:
        """Begin new counts and return those so far; what is alive stays counted."""
        counts, self.counts = self.counts, Counts()
        return counts

    def leave_out(self, tensor: Tensor) -> Tensor:
        """Count the tensor's memory as somebody else's from now on; returns the tensor."""
        key = _key(tensor)
        if key in self._alive:
            self._num_alive -= self._alive.pop(key)[1]
        self._outside[key] = tensor
        return tensor

    def num_new(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of ``tensors`` that were made under this meter, each once."""
        new = {_key(tensor) for tensor in tensors} & self._alive.keys()
        return sum(self._alive[key][1] for key in new)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and count it."""
        result = super().run(func, args, kwargs)
        self.counts.calls += 1
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = sum([self._keep(tensor) for tensor in made])
        writes = fresh or func._schema.is_mutable
        if writes and func.overloadpacket not in _MAKE_ONLY:
            flops, sort = self._arithmetic(func, args, kwargs, result)
            read = _tensors(args, {k: v for k, v in kwargs.items() if k != "out"})
            self.counts.note(sort, flops=flops, moved=_moved(func, read, made))
        if fresh:
            self.counts.alive.append(self._num_alive)
        return result

    def _keep(self, tensor: Tensor) -> bool:
        """Count a result's memory as alive; False if it is known already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._outside or key in self._alive:
            return False
        size = storage.nbytes()

        def gone(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self._num_alive -= size

        self._alive[key] = (weakref.ref(storage, gone), size)
        self._num_alive += size
        return True

    def _arithmetic(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[int, str]:
        packet = func.overloadpacket
        if packet is _aten._grouped_mm:
            return 2 * prod(args[0].shape) * args[1].shape[-1], EXPERTS  # each row meets one expert
        count: Callable[..., int] | None = flop_registry.get(packet)
        if count is None:
            return 0, POINTWISE
        if func in _INTO_WIDER:
            args = args[:3]  # the counter of torch 2.13 does not know the dtype that follows
        flops = int(count(*args, **kwargs, out_val=result))
        operands = [x for x in args if isinstance(x, Tensor) and x.dim() >= 2]
        if func in _INTO_WIDER:
            operands = operands[1:]
        sides = [side for x in operands for side in x.shape[-2:]]
        if min(sides, default=0) < _SHORT:
            return flops, THIN
        is_wide = operands[0].dtype == torch.float32 != self._dtype
        return flops, WIDE if is_wide else MATRIX


def _answer(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _grouped(left: Tensor, right: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """What a grouped product returns; on meta PyTorch 2.13 only knows it in bf16.

    ``[tokens, k] x [groups, k, n]``; ``[k, tokens] x [tokens, n]`` gives one for each group.
    """
    rows = left.shape[-2:-1]
    if right.dim() == 2:
        return left.new_empty(offs.shape[0], *rows, right.shape[1])
    return left.new_empty(*rows, right.shape[-1])


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(*trees: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor))


def _num_bytes(tensor: Tensor) -> int:
    """What reading or writing all of it moves: a repeated element only once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())


def _moved(func: Any, read: Iterable[Tensor], made: list[Tensor]) -> int:
    written = sum(_num_bytes(tensor) for tensor in made)
    if func.overloadpacket in _LOOK_UP:
        return 2 * written
    skipped = 1 if func.overloadpacket in _FILL else 0
    return written + sum(_num_bytes(tensor) for tensor in list(read)[skipped:])
