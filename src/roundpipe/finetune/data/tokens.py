"""Samples written to flat files and mapped back.

    input_ids    int32 [tokens]        labels       int32 [tokens]
    starts       int64 [samples + 1]   num_trained  int32 [samples]
    rows         int64 [samples]       marks        int64 [samples]      little-endian

Files that nobody keeps have no name: they vanish with the process, however it ends.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from roundpipe.finetune.data.samples import ARRAYS, Part, digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from roundpipe.finetune.data.samples import Sample


class TokenWriter:
    """Takes samples, a chunk at a time, into files in ``folder``, or without a name ``near`` it.

    Raises OSError where a disk is full or cannot be written.
    """

    def __init__(self, folder: Path | None, *, near: Path | None = None) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}
        self._tokens = 0
        try:
            for name in ARRAYS:
                if folder is None:
                    self._files[name] = tempfile.TemporaryFile(dir=near)  # noqa: SIM115, kept
                else:
                    self._files[name] = (folder / f"{name}.bin").open("x+b")
        except BaseException:
            self.close()
            raise
        self._write("starts", np.zeros(1, np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; those without a name vanish unless they are mapped."""
        for file in self._files.values():
            file.close()

    def add(self, samples: Sequence[Sample], rows: Sequence[int]) -> None:
        """Append samples; ``rows``: the number of the row that each was made of, rising."""
        if not samples:
            return
        starts = self._tokens + np.cumsum([len(sample) for sample in samples], dtype=np.int64)
        self._write("input_ids", np.concatenate([sample.input_ids for sample in samples]))
        self._write("labels", np.concatenate([sample.labels for sample in samples]))
        self._write("starts", starts)
        self._write("num_trained", np.array([s.num_trained for s in samples], np.int32))
        self._write("rows", np.array(rows, np.int64))
        self._write("marks", np.array([sample.mark for sample in samples], np.int64))
        self._tokens = int(starts[-1])

    def finish(self) -> dict[str, str]:
        """Bring everything to the files and return the SHA-256 of each."""
        for file in self._files.values():
            file.flush()
        return {name: found.hexdigest() for name, found in self._hashes.items()}

    def mapped(self) -> Part:
        """The samples, after ``finish``, in files that stay open as long as they are used."""
        arrays = {name: _map(file, ARRAYS[name]) for name, file in self._files.items()}
        return _part(arrays, self.finish())

    def _write(self, name: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=ARRAYS[name]).tobytes()
        self._hashes[name].update(data)
        self._files[name].write(data)


def map_folder(folder: Path, hashes: Mapping[str, str]) -> Part:
    """The samples of a folder that a writer filled; ``hashes`` are what its ``finish`` returned."""
    arrays = {name: _map(folder / f"{name}.bin", kind) for name, kind in ARRAYS.items()}
    return _part(arrays, hashes)


def _part(arrays: Mapping[str, NDArray[Any]], hashes: Mapping[str, str]) -> Part:
    return Part(
        input_ids=arrays["input_ids"],
        labels=arrays["labels"],
        starts=arrays["starts"],
        num_trained=arrays["num_trained"],
        rows=arrays["rows"],
        marks=arrays["marks"],
        digest=digest_of(hashes),
    )


def _map(file: Path | IO[bytes], kind: str) -> NDArray[Any]:
    """A file as a read-only array; an empty one cannot be mapped."""
    if isinstance(file, Path):
        is_empty = file.stat().st_size == 0
    else:
        is_empty = file.seek(0, 2) == 0
        file.seek(0)
    if is_empty:
        return np.zeros(0, kind)
    found: Any = np.memmap(file, dtype=kind, mode="r")
    return np.asarray(found)
