"""Samples that lie on disk: a list that is as long as it likes and takes no memory.

A part of a dataset is six flat files (`tokens.py` writes them); a ``Samples`` joins such parts, or
some samples of each, into one sequence. Reading sample i copies its few kilobytes out of a memory
map; the pages behind it belong to the system, which gives them up when memory is short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

# What a part consists of, and how each array lies in a file.
ARRAYS = {
    "input_ids": "<i4",
    "labels": "<i4",
    "starts": "<i8",
    "num_trained": "<i4",
    "rows": "<i8",
    "marks": "<i8",
}
IGNORED = -100  # the label of a token that is not trained, as torch's cross entropy has it


class Sample:
    """One sequence. ``labels[i]`` is ``input_ids[i]`` where that token is trained, else -100.

    Both are int32 [length]; any sequence of integers may be given. Not to be changed.
    """

    __slots__ = ("input_ids", "labels")

    def __init__(self, input_ids: ArrayLike, labels: ArrayLike) -> None:
        self.input_ids: NDArray[np.int32] = np.asarray(input_ids, dtype=np.int32)
        self.labels: NDArray[np.int32] = np.asarray(labels, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and all(
            np.array_equal(ours, theirs)
            for ours, theirs in ((self.input_ids, other.input_ids), (self.labels, other.labels))
        )

    def __hash__(self) -> int:
        return hash((self.input_ids.tobytes(), self.labels.tobytes()))

    def __repr__(self) -> str:
        return f"Sample({self.input_ids.tolist()}, {self.labels.tolist()})"

    @property
    def num_trained(self) -> int:
        """How many tokens count in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED))

    @property
    def mark(self) -> int:
        """A number of 64 bits by which samples of the same tokens and labels know each other."""
        digest = hashlib.blake2b(self.input_ids.tobytes(), digest_size=8)
        digest.update(self.labels.tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass(frozen=True, eq=False)
class Part:
    """Samples end to end. Sample i is ``[starts[i] : starts[i + 1]]`` of both token arrays.

    ``input_ids``, ``labels``: int32 [tokens]; ``starts``: int64 [samples + 1]; ``num_trained``:
    int32 [samples]; ``rows``: int64 [samples], rising, which row of the data a sample was made of
    (some rows give several); ``marks``: int64 [samples], their ``mark``; ``digest``: SHA-256 over
    lengths, tokens and labels.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    starts: NDArray[np.int64]
    num_trained: NDArray[np.int32]
    rows: NDArray[np.int64]
    marks: NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.num_trained)

    def sample(self, i: int) -> Sample:
        """Sample ``i``, copied."""
        start, stop = int(self.starts[i]), int(self.starts[i + 1])
        return Sample(self.input_ids[start:stop].copy(), self.labels[start:stop].copy())


@dataclass(frozen=True, eq=False)
class _Piece:
    """All samples of a part, or those of ``chosen`` (int64, in that order)."""

    part: Part
    chosen: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.part if self.chosen is None else self.chosen)

    def sample(self, i: int) -> Sample:
        return self.part.sample(i if self.chosen is None else int(self.chosen[i]))

    def of_each(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.chosen is None else values[self.chosen]

    def take(self, indices: NDArray[np.int64]) -> _Piece:
        return _Piece(self.part, indices if self.chosen is None else self.chosen[indices])

    def feed(self, digest: Any) -> None:
        digest.update(self.part.digest.encode())
        if self.chosen is not None:
            digest.update(self.chosen.astype("<i8").tobytes())


class Samples(Sequence[Sample]):
    """Samples of several parts, one after another; ``samples[i]`` is read when it is asked for."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._set([_Piece(part) for part in parts])

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """The given samples, in memory."""
        return cls([part_of(samples)])

    @classmethod
    def joined(cls, several: Iterable[Samples]) -> Samples:
        """Samples of several datasets, one after another."""
        made = cls()
        made._set([piece for samples in several for piece in samples._pieces])
        return made

    def _set(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        at = int(np.searchsorted(self._ends, position, side="right"))
        return self._pieces[at].sample(int(position - (self._ends[at - 1] if at else 0)))

    def __repr__(self) -> str:
        return f"<{len(self)} samples>"

    def take(self, indices: Iterable[int]) -> Samples:
        """The samples at ``indices``, which must rise."""
        chosen = np.fromiter(indices, dtype=np.int64)
        pieces = []
        start = 0
        for piece, end in zip(self._pieces, self._ends.tolist(), strict=True):
            low, high = np.searchsorted(chosen, (start, end))
            pieces.append(piece.take(chosen[low:high] - start))
            start = end
        taken = Samples()
        taken._set(pieces)
        return taken

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [samples]."""
        each = [piece.of_each(np.diff(piece.part.starts)) for piece in self._pieces]
        return np.concatenate(each) if each else np.zeros(0, np.int64)

    @cached_property
    def num_trained(self) -> NDArray[np.int32]:
        """Trained tokens of each sample, int32 [samples]."""
        each = [piece.of_each(piece.part.num_trained) for piece in self._pieces]
        return np.concatenate(each) if each else np.zeros(0, np.int32)

    def marks(self) -> NDArray[np.int64]:
        """The mark of each sample."""
        each = [piece.of_each(piece.part.marks) for piece in self._pieces]
        return np.concatenate(each) if each else np.zeros(0, np.int64)

    def rows(self) -> NDArray[np.int64]:
        """A number for the row of the data that each sample was made of, rising, from 0."""
        found: list[NDArray[np.int64]] = []
        first = 0
        for piece in self._pieces:
            if len(piece):
                _, numbers = np.unique(piece.of_each(piece.part.rows), return_inverse=True)
                found.append(first + numbers)
                first += int(numbers[-1]) + 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 that changes with any token, label, length or order, and with nothing else.

        It hangs on where one part of the dataset ends and the next begins, too.
        """
        digest = hashlib.sha256()
        for piece in self._pieces:
            piece.feed(digest)
        return digest.hexdigest()


def part_of(samples: Iterable[Sample]) -> Part:
    """A part of samples that are in memory."""
    found = list(samples)
    empty = [np.zeros(0, np.int32)]
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": np.concatenate(empty + [sample.input_ids for sample in found]),
        "labels": np.concatenate(empty + [sample.labels for sample in found]),
        "starts": np.cumsum([0, *map(len, found)], dtype=np.int64),
    }
    hashes = {
        name: hashlib.sha256(np.asarray(values, ARRAYS[name]).tobytes()).hexdigest()
        for name, values in arrays.items()
    }
    num_trained = np.array([sample.num_trained for sample in found], np.int32)
    return Part(
        **arrays,
        num_trained=num_trained,
        rows=np.arange(len(found), dtype=np.int64),
        marks=np.array([sample.mark for sample in found], np.int64),
        digest=digest_of(hashes),
    )


def digest_of(hashes: Mapping[str, str]) -> str:
    """The digest of a part from the SHA-256 of its arrays."""
    what = "".join(hashes[name] for name in ("input_ids", "labels", "starts"))
    return hashlib.sha256(what.encode()).hexdigest()
