"""Rows of files that are text: JSON lines, JSON arrays, CSV, plain lines.

Lines are cut at ``\\n`` bytes alone (JSON strings may hold other separators) and decoded one by
one, so that a byte of another encoding spoils its line and no other. An array is decoded item by
item out of a window that moves over the file; what follows a broken item cannot be told apart, so
that one is never skipped.
"""

from __future__ import annotations

import csv
import io
import json
from typing import IO, TYPE_CHECKING, Any, cast

from roundpipe.errors import DataError
from roundpipe.finetune.data.array_rows import array_rows
from roundpipe.finetune.data.files import DataFile, opened
from roundpipe.finetune.data.problems import (
    Place,
    Row,
    broken_json,
    not_an_object,
    not_utf8,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.finetune.data.problems import Report

LONGEST = 1 << 28  # bytes of a line; more than any sample is, and all that is held at once
_BOM = b"\xef\xbb\xbf"


def line_rows(file: DataFile, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
    """A JSON object a line."""
    with opened(file, show) as stream:
        yield from _objects(stream, file, report)


def json_rows(file: DataFile, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
    """A .json file holds an array, or, as many do, one object a line."""
    with opened(file, show) as stream:
        buffered = io.BufferedReader(cast("io.RawIOBase", stream), 1 << 18)
        start = buffered.peek(1 << 16).removeprefix(_BOM).lstrip()
        if start[:1] == b"[":
            yield from array_rows(buffered, file, report)
            return
        if start.partition(b"\n")[0].strip() == b"{":
            raise DataError(
                f"not a list of rows: {file.name} holds one object"
                "\nhint: an array of objects, or one object a line"
            )
        yield from _objects(buffered, file, report)


def lines_of(file: DataFile, show: Callable[[int], None]) -> Iterator[bytes]:
    """The lines of a file that are not blank, as they are."""
    with opened(file, show) as stream:
        for _, raw in _lines(stream, file):
            yield raw


def text_rows(file: DataFile, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
    """A sample of text a line, as the text files of the `datasets` library; blank ones are none."""
    with opened(file, show) as stream:
        for place, raw in _lines(stream, file):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as problem:
                report(not_utf8(place, raw, problem.start), place, raw)
                continue
            yield Row(place, {"text": text.rstrip("\r\n")}, raw)


def _objects(stream: IO[bytes], file: DataFile, report: Report) -> Iterator[Row]:
    for place, raw in _lines(stream, file):
        try:
            yield Row(place, _parse(raw, place), raw)
        except DataError as problem:
            report(problem, place, raw)


def _lines(stream: IO[bytes], file: DataFile) -> Iterator[tuple[Place, bytes]]:
    """The lines that are not blank."""
    number = 0
    while raw := stream.readline(LONGEST):
        number += 1
        if len(raw) == LONGEST:
            raise DataError(
                f"a line of more than {LONGEST >> 20} MB: {file.name}, line {number}"
                "\nhint: a .json file may hold one array; .jsonl has a row a line"
            )
        content = raw.removeprefix(_BOM) if number == 1 else raw
        if content.strip():
            yield Place(file.name, number), content


def _parse(raw: bytes, place: Place) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as problem:
        raise not_utf8(place, raw, problem.start) from problem
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise broken_json(place, text, problem.pos, problem.msg) from problem
    except RecursionError as problem:
        raise broken_json(place, text, 0, "nested too deeply") from problem
    if not isinstance(value, dict):
        raise not_an_object(place, value)
    return value


def csv_rows(file: DataFile, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
    """Rows under the names of the first line; every cell is text, an empty one the empty text.

    Cells may hold line breaks where they are quoted; a row's place is the line it starts on.
    """
    csv.field_size_limit(LONGEST)  # the module's own, of 128 kB, is for the whole process
    with opened(file, show) as stream:
        # Bytes that are no UTF-8 become lone surrogates, so that only their row is spoilt.
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        first = text.readline(LONGEST)
        again = _Chained(first, text)
        reader = csv.reader(again, delimiter=_delimiter(first, file), strict=True)
        columns = _columns(reader, file)
        while True:
            place = Place(file.name, reader.line_num + 1)
            try:
                if cells := next(reader):
                    yield _csv_row(cells, columns, place)
            except StopIteration:
                return
            except (csv.Error, DataError) as problem:
                report(_csv_problem(problem, place), place, again.taken())
            again.taken()


def _delimiter(first: str, file: DataFile) -> str:
    """What parts the names of the first line: spreadsheets of some languages write ; for ,."""
    if any(suffix.lower() == ".tsv" for suffix in file.path.suffixes):
        return "\t"
    return next((mark for mark in (",", ";", "\t", "|") if mark in first), ",")


def _columns(reader: Any, file: DataFile) -> list[str]:
    place = Place(file.name, 1)
    try:
        columns: list[str] = next(reader, [])
    except csv.Error as problem:
        raise _csv_problem(problem, place) from problem
    _check_text(columns, place)
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(
            f"a column twice: {', '.join(twice)[:100]} ({place})"
            "\nhint: give one of them another name in the first line"
        )
    return columns


def _csv_row(cells: list[str], columns: list[str], place: Place) -> Row:
    if len(cells) != len(columns):
        raise DataError(
            f"{len(cells)} cells under {len(columns)} columns: {place}"
            "\nhint: put text with commas or line breaks in quotes, or on_bad_line=skip"
        )
    _check_text(cells, place)
    return Row(place, dict(zip(columns, cells, strict=True)))


def _check_text(cells: list[str], place: Place) -> None:
    for cell in cells:
        try:
            cell.encode()
        except UnicodeEncodeError as problem:
            raw = cell.encode("utf-8", "surrogateescape")
            start = len(cell[: problem.start].encode("utf-8", "surrogateescape"))
            raise not_utf8(place, raw, start) from problem


def _csv_problem(problem: Exception, place: Place) -> DataError:
    if isinstance(problem, DataError):
        return problem
    return DataError(
        f"broken CSV: {place}: {problem}"
        '\nhint: a quote inside a quoted cell is written twice (""), or on_bad_line=skip'
    )


class _Chained:
    """The first line, then the others; keeps what was taken since it was last asked."""

    def __init__(self, first: str, rest: IO[str]) -> None:
        self._first = first
        self._rest = rest
        self._taken: list[str] = []

    def __iter__(self) -> _Chained:
        return self

    def __next__(self) -> str:
        line, self._first = self._first, ""
        line = line or self._rest.readline(LONGEST)
        if not line:
            raise StopIteration
        self._taken.append(line)
        return line

    def taken(self) -> bytes:
        """The lines taken since the last call."""
        lines, self._taken = self._taken, []
        return "".join(lines).encode("utf-8", "surrogateescape")
