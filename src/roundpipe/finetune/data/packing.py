"""Several samples in one row, by best fit decreasing: the longest first, each into the fullest row
that still has room.

Rows with the same room left are alike, and so are samples of the same length. So the rows are kept
as ranges of numbers under the room they have left, the samples are taken a length at a time, and
one operation puts many of them into many rows:

    room 7: rows 0-99          300 samples of length 3: two in each of rows 0-99, the rest into
    room 5: rows 100-120       rows with room 7 - but first into those with room 5, which fit better

An operation places one sample at least, usually thousands: a million samples take a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Packing:
    """Which samples stand in which row: those of row r are ``order[starts[r]:starts[r + 1]]``.

    ``order`` holds every sample's number once; within a row they rise.
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]  # of each row

    @property
    def share_filled(self) -> float:
        """Tokens over the places there would be if every row were as long as the longest."""
        return float(self.tokens.mean() / self.tokens.max()) if len(self.tokens) else 0.0

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.tokens)

    def row(self, row: int) -> tuple[int, ...]:
        """The samples of a row."""
        return tuple(self.order[self.starts[row] : self.starts[row + 1]].tolist())


def pack(
    lengths: NDArray[np.int64], capacity: int, *, parts: Sequence[tuple[int, int]] | None = None
) -> Packing:
    """Put samples of these ``lengths`` into rows of at most ``capacity`` tokens.

    ``parts``: ranges (start, stop) of samples that share no row with those of another, together all
    of them; one range if None. Every length is in 1 … ``capacity``. The same lengths always come
    out the same.
    """
    assert not len(lengths) or 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity, capacity
    ranges = parts if parts is not None else [(0, len(lengths))]
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for start, stop in ranges:
        row_of[start:stop], more = _rows_of(lengths[start:stop], capacity)
        row_of[start:stop] += num_rows
        num_rows += more
    counts = np.bincount(row_of, minlength=num_rows)
    return Packing(
        order=np.argsort(row_of, kind="stable"),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        tokens=np.bincount(row_of, weights=lengths, minlength=num_rows).astype(np.int64),
    )


def _rows_of(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The row of each sample, and how many rows there are."""
    if not len(lengths):
        return lengths, 0
    longest_first = np.argsort(-lengths, kind="stable")
    placed = np.empty(len(lengths), np.int64)  # the rows of ``longest_first``
    rows = _OpenRows(capacity)
    sizes, firsts = np.unique(-lengths[longest_first], return_index=True)
    ends = [*firsts[1:].tolist(), len(lengths)]
    for size, first, end in zip((-sizes).tolist(), firsts.tolist(), ends, strict=True):
        at = first
        while at < end:
            taken = rows.place(size, end - at)
            placed[at : at + len(taken)] = taken
            at += len(taken)
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = placed
    return row_of, rows.count


class _OpenRows:
    """Rows that have been begun, as ranges of their numbers under the room they have left."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._capacity = capacity
        self._rooms: list[int] = []  # those of which there are rows, rising
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def place(self, size: int, wanted: int) -> NDArray[np.int64]:
        """Put up to ``wanted`` samples of one size where they fit best: the row of each."""
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            rows = -(-wanted // (self._capacity // size))
            self._add(self._capacity, (self.count, self.count + rows))
            self.count += rows
            at = len(self._rooms) - 1
        room = self._rooms[at]
        start, stop = self._take(room, at)
        # Filled up once begun: with one sample more it has less room and still the least.
        each = room // size
        full = min(stop - start, wanted // each)
        if full:
            self._add(room - each * size, (start, start + full))
            self._add(room, (start + full, stop))
            return np.repeat(np.arange(start, start + full), each)
        self._add(room - wanted * size, (start, start + 1))
        self._add(room, (start + 1, stop))
        return np.full(wanted, start)

    def _take(self, room: int, at: int) -> tuple[int, int]:
        ranges = self._ranges[room]
        taken = ranges.pop()
        if not ranges:
            del self._ranges[room], self._rooms[at]
        return taken

    def _add(self, room: int, rows: tuple[int, int]) -> None:
        if rows[0] == rows[1] or room == 0:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._rooms, room)
        self._ranges[room].append(rows)
