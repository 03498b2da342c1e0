"""A shuffled order of any length that is never written down.

What stands at a place of the order is calculated from the place, so a run that goes on at step
50,000 need not draw what came before, and 10^8 samples take no memory. It is integer arithmetic
alone: no version of a library and no machine changes an order once begun.

A Feistel network permutes the numbers of 2k bits: split in halves (left, right), each round makes
them (right, left xor mixed(right)), whose inverse is plain whatever ``mixed`` does. Of the smallest
such range that holds ``count`` only the part below ``count`` is wanted: what falls outside is
permuted again until it falls inside, at most a few times (cycle walking), which leaves a
permutation of 0 … count-1.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 8  # four hide the structure in large ranges (Luby and Rackoff 1988); small ones need more


def permuted(places: NDArray[np.int64], count: int, key: str) -> NDArray[np.int64]:
    """What stands at ``places`` of the order of 0 … ``count`` - 1 that ``key`` names.

    Over all places every number appears once. ``places``: int64, each in 0 … ``count`` - 1.
    """
    assert count > 0
    half = max(2, -(-(count - 1).bit_length() // 2))
    keys = _round_keys(key)
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _feistel(found[outside], half, keys)
        outside = outside[found[outside] >= np.uint64(count)]
    return found.astype(np.int64)


def _round_keys(key: str) -> NDArray[np.uint64]:
    digest = hashlib.shake_256(key.encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(
    numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finisher of splitmix64: every bit of the input changes half of the output's."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
