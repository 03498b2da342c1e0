"""Rows of a dataset entry, whatever its files are, each with the place it stands at.

Everything is read as a stream: no file is ever in memory as a whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from roundpipe.errors import DataError
from roundpipe.finetune.data.files import DataFile, Split, find_files, is_hub_id, split_of
from roundpipe.finetune.data.problems import Place, Row, stop_at_once
from roundpipe.finetune.data.text_rows import csv_rows, json_rows, line_rows, lines_of, text_rows
from roundpipe.finetune.settings.entry import DatasetEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from roundpipe.finetune.data.problems import Report

_COUNTED = 1 << 28  # bytes up to which the rows of a file are counted
_ENOUGH_ROWS = 20_000  # that tell how many bytes a row has

__all__ = ["Place", "Row", "RowSource", "open_rows", "read_rows"]


class RowSource(Protocol):
    """The rows of an entry and the files that they are read from."""

    @property
    def paths(self) -> list[Path]:
        """The files whose content the rows are."""
        ...

    @property
    def manner(self) -> Any:
        """How those files become rows, as JSON: the same files and manner give the same rows."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        ...

    def rows(self, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
        """All rows of the split."""
        ...

    def count(self) -> int:
        """How many rows those are, or about so many where the files are very large."""
        ...


@dataclass(frozen=True)
class FileRows:
    """Rows of files of this machine."""

    files: Sequence[DataFile]
    split: Split

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [file.path for file in self.files]

    @property
    def manner(self) -> Any:
        """Kinds and packing of the files, and which of their rows."""
        kinds = [[file.kind, file.packed, file.path.suffix == ".tsv"] for file in self.files]
        return [kinds, self.split.start, self.split.stop]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.num_bytes for file in self.files)

    def rows(self, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
        """The rows of one file after another."""
        return itertools.islice(self._all(report, show), self.split.start, self.split.stop)

    def count(self) -> int:
        """How many rows those are, or about so many where the files are very large."""
        count = sum(_count(file) for file in self.files)
        stop = count if self.split.stop is None else min(self.split.stop, count)
        return max(stop - self.split.start, 0)

    def _all(self, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
        before = 0
        for file in self.files:
            yield from rows_of_file(file, report, partial(_show_from, show, before))
            before += file.num_bytes
            show(before)


def open_rows(entry: DatasetEntry) -> RowSource:
    """Find the files of an entry; blocks while those of the hub are downloaded.

    Raises DataError for files that are missing or of no kind that is read.
    """
    if is_hub_id(entry):
        from roundpipe.finetune.data.hub import HubRows, load_from_hub  # noqa: PLC0415, seconds

        return HubRows(load_from_hub(entry), entry.path)
    return FileRows(find_files(entry), split_of(entry))


def read_rows(
    entry: DatasetEntry | str,
    *,
    report: Report = stop_at_once,
    show: Callable[[int], None] = lambda read: None,
    source: RowSource | None = None,
) -> Iterator[Row]:
    """Yield the rows of an entry, ``max_samples`` at most.

    ``report`` is told of each row that cannot be read and returns if reading is to go on; ``show``
    of the bytes read so far; ``source`` if it was opened before. Raises DataError for files that
    are missing, of no known kind, damaged or without any row.
    """
    entry = DatasetEntry.model_validate({"path": entry}) if isinstance(entry, str) else entry
    count = 0

    def counted(problem: DataError, place: Place, raw: bytes | None) -> None:
        nonlocal count
        count += 1
        report(problem, place, raw)

    rows = (source or open_rows(entry)).rows(counted, show)
    for row in itertools.islice(rows, entry.max_samples):
        count += 1
        yield row
    if count == 0:
        if entry.split is not None and "[" in entry.split:
            raise DataError(
                f"no rows: {entry.path} has none in split {entry.split}"
                "\nhint: leave split out, or take rows that are there: split: 'train[:1000]'"
            )
        raise DataError(f"no rows: {entry.path} is empty\nhint: one JSON object a line")


def _count(file: DataFile) -> int:
    """Rows of a file; of a very large one about so many, told by the bytes of the first."""
    if file.kind in ("parquet", "arrow"):
        from roundpipe.finetune.data.table_rows import count_table_rows  # noqa: PLC0415, pyarrow

        return count_table_rows(file)
    read = 0

    def show(done: int) -> None:
        nonlocal read
        read = done

    rows: Iterator[Any] = rows_of_file(file, lambda problem, place, raw: None, show)
    if file.kind in ("lines", "text"):
        rows = lines_of(file, show)
    size, count = file.num_bytes, 0
    for count, _ in enumerate(rows, start=1):
        if size > _COUNTED and count >= _ENOUGH_ROWS and read:
            return round(count * size / read)
    return count


def _show_from(show: Callable[[int], None], start: int, read: int) -> None:
    show(start + read)


def rows_of_file(file: DataFile, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
    """The rows of one file."""
    if file.kind in ("parquet", "arrow"):
        from roundpipe.finetune.data.table_rows import table_rows  # noqa: PLC0415, pyarrow

        return table_rows(file, show)
    readers = {"lines": line_rows, "json": json_rows, "csv": csv_rows, "text": text_rows}
    return readers[file.kind](file, report, show)
