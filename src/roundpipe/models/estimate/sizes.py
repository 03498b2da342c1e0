"""What the layers of a model without weights would take in the store: see `roundpipe.store`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from roundpipe.models.estimate.profile import Sizes
from roundpipe.store.gradients import partial_sum_dtype, widened
from roundpipe.store.packed import packed_entries
from roundpipe.store.segment import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from torch import Tensor

    from roundpipe.store.segment import Entry


def layer_sizes(layers: Sequence[Mapping[str, Tensor]], *, packed: Set[str]) -> list[Sizes]:
    """Sizes of layers that read these tensors, by name; the first that reads one owns it.

    ``packed``: names of frozen matrices that are kept in 4 bits.
    """
    owners: dict[str, int] = {}
    for index, tensors in enumerate(layers):
        for name in tensors:
            owners.setdefault(name, index)
    lent = {
        name
        for index, tensors in enumerate(layers)
        for name, tensor in tensors.items()
        if owners[name] != index and tensor.requires_grad
    }
    return [_sizes(index, tensors, owners, lent, packed) for index, tensors in enumerate(layers)]


def _sizes(
    index: int,
    tensors: Mapping[str, Tensor],
    owners: Mapping[str, int],
    lent: Set[str],
    packed: Set[str],
) -> Sizes:
    own = {name: tensor for name, tensor in tensors.items() if owners[name] == index}
    borrowed = {name: tensor for name, tensor in tensors.items() if owners[name] != index}
    trained = {name: tensor for name, tensor in own.items() if tensor.requires_grad}
    frozen = {name: tensor for name, tensor in own.items() if name not in trained}
    whole = Layout.of(_entry(name, tensor) for name, tensor in _by_dtype(trained).items())
    weights = whole.followed_by(_entries(frozen, packed))
    sums = widened(whole)
    borrowed_trained = {name: t for name, t in borrowed.items() if t.requires_grad}
    unpacked = [_num_bytes(tensor) for name, tensor in tensors.items() if name in packed]
    return Sizes(
        own=weights.num_bytes,
        slot=weights.followed_by(_entries(borrowed, packed)).num_bytes,
        sums=sums.followed_by(_wide(_entries(borrowed_trained, frozenset()))).num_bytes,
        own_sums=sums.num_bytes,
        own_whole=whole.num_bytes,
        trained=tuple((prod(shape), dtype.itemsize) for _, shape, dtype in whole.entries),
        borrows=tuple(sorted({owners[name] for name in borrowed})),
        shares=not lent.isdisjoint(tensors),
        unpacked=sum(unpacked),
        largest_unpacked=max(unpacked, default=0),
    )


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trainable tensors in the order in which they lie: dtype by dtype."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    return dict(sorted(tensors.items(), key=lambda item: dtypes.index(item[1].dtype)))


def _entries(tensors: Mapping[str, Tensor], packed: Set[str]) -> Iterator[Entry]:
    for name, tensor in tensors.items():
        if name in packed:
            yield from packed_entries(name, tensor.numel())
        else:
            yield _entry(name, tensor)


def _entry(name: str, tensor: Tensor) -> Entry:
    return name, tuple(tensor.shape), tensor.dtype


def _wide(entries: Iterator[Entry]) -> Iterator[Entry]:
    return ((name, shape, partial_sum_dtype(dtype)) for name, shape, dtype in entries)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
