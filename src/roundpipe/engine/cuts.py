"""Which copies make up each chunk of a visit's weights: worked out once, so issuing one is quick.

[Note: chunks] A visit's weights are one run of bytes on the device; chunk k of n is the k-th of n
equal parts of it, rounded to 256 bytes, wherever tensors and layers begin and end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roundpipe.store.frozen import UploadPiece
    from roundpipe.store.layer import HostLayer

_GRAIN = 256
_AT_ONCE = 64 << 20  # bytes of a mapped file in one copy: its pages stay in memory as long


def chunk_range(num_bytes: int, chunk: int, count: int) -> tuple[int, int]:
    """First byte and the byte after the last of one of ``count`` equal parts."""

    def cut(at: int) -> int:
        return num_bytes if at == count else num_bytes * at // count // _GRAIN * _GRAIN

    return cut(chunk), cut(chunk + 1)


class Cut(NamedTuple):
    """One copy: ``source`` goes to byte ``at`` of the slot; it is ``piece`` from ``begin`` on."""

    at: int
    source: Tensor
    piece: UploadPiece
    begin: int


class Cuts:
    """The copies of every chunk of every visit, kept until a layer is laid out anew."""

    def __init__(self, layers: Sequence[HostLayer]) -> None:
        self._layers = layers
        self._kept: dict[tuple[int, int, int], tuple[list[object], list[list[Cut]]]] = {}

    def of(self, layers: range, chunk: int, count: int) -> list[Cut]:
        """The copies of chunk ``chunk`` of ``count`` of the weights of ``layers``."""
        key = (layers.start, layers.stop, count)
        pieces = [self._layers[layer].upload_pieces() for layer in layers]
        kept = self._kept.get(key)
        if kept is None or any(a is not b for a, b in zip(kept[0], pieces, strict=True)):
            kept = self._kept[key] = (list(pieces), self._cut(layers, count))
        return kept[1][chunk]

    def forget(self) -> None:
        """Let go of the memory that copies are made from."""
        self._kept.clear()

    def _cut(self, layers: range, count: int) -> list[list[Cut]]:
        size = sum(self._layers[layer].slot_layout.num_bytes for layer in layers)
        ranges = [chunk_range(size, chunk, count) for chunk in range(count)]
        cuts: list[list[Cut]] = [[] for _ in range(count)]
        start = 0
        for layer in layers:
            for piece in self._layers[layer].upload_pieces():
                first = start + piece.offset
                for chunk, (low, high) in enumerate(ranges):
                    a, b = max(low, first), min(high, first + piece.num_bytes)
                    step = b - a if piece.let_go is None else _AT_ONCE
                    for at in range(a, b, max(step, 1)):
                        source = piece.source.narrow(0, at - first, min(step, b - at))
                        cuts[chunk].append(Cut(at, source, piece, at - first))
            start += self._layers[layer].slot_layout.num_bytes
        return cuts
