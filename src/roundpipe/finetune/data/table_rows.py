"""Rows of Parquet and Arrow files, a few hundred at a time.

A column of structs gives each of its values every field that any value has, null where it had none.
Such nulls are taken out again, or a chat template would see a tool call in every message.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from roundpipe.errors import DataError
from roundpipe.finetune.data.files import DataFile, import_arrow, unpacked
from roundpipe.finetune.data.problems import Place, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROWS = 256  # that become Python objects at once


def table_rows(file: DataFile, show: Callable[[int], None]) -> Iterator[Row]:
    """The rows of a .parquet or .arrow file; their places are row numbers. Raises DataError."""
    read = _parquet_batches if file.kind == "parquet" else _arrow_batches
    with _damage_named(file), unpacked(file, lambda read: None) as source:
        yield from batch_rows(read(source, file, show), file.name)


@contextlib.contextmanager
def _damage_named(file: DataFile) -> Iterator[None]:
    arrow = import_arrow(file.name)
    try:
        yield
    except (arrow.ArrowException, OSError, EOFError) as problem:
        why = " ".join(str(problem).split())[:160]
        raise DataError(
            f"damaged {file.kind} file: {file.name}: {why[:1].lower() + why[1:]}"
            "\nhint: copy it again, or check that its name says what it is"
        ) from problem


def count_table_rows(file: DataFile) -> int:
    """How many rows a .parquet or .arrow file has. Raises DataError."""
    with _damage_named(file), unpacked(file, lambda read: None) as source:
        if file.kind == "parquet":
            with importlib.import_module("pyarrow.parquet").ParquetFile(source) as table:
                return int(table.metadata.num_rows)
        return sum(batch.num_rows for batch in _arrow_batches(source, file, lambda read: None))


def batch_rows(batches: Iterable[Any], name: str) -> Iterator[Row]:
    """The rows of record batches or tables, numbered from 1."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS):
            for values in batch.slice(start, ROWS).to_pylist():
                number += 1
                place = Place(name, number, "row")
                yield Row(place, {key: without_nulls(value) for key, value in values.items()})


def without_nulls(value: Any) -> Any:
    """The value without the fields that are null, at any depth; null itself stays."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _parquet_batches(
    source: Path | IO[bytes], file: DataFile, show: Callable[[int], None]
) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(source) as table:
        size, total, done = file.num_bytes, max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(batch_size=ROWS):
            yield batch
            done += batch.num_rows
            show(size * done // total)


def _arrow_batches(
    source: Path | IO[bytes], file: DataFile, show: Callable[[int], None]
) -> Iterator[Any]:
    """Batches of the file format, which ends in an index, or of the stream format."""
    arrow = import_arrow(file.name)
    opened: Any = arrow.memory_map(str(source)) if isinstance(source, Path) else source
    try:
        begin = opened.read(6)
        opened.seek(0)
        if begin == b"ARROW1":
            with arrow.ipc.open_file(opened) as table:
                for i in range(table.num_record_batches):
                    yield table.get_batch(i)
                    show(file.num_bytes * (i + 1) // table.num_record_batches)
            return
        with arrow.ipc.open_stream(opened) as table:
            for batch in table:
                yield batch
                show(min(opened.tell(), file.num_bytes))
    finally:
        opened.close()
