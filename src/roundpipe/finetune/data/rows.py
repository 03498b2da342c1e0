"""Rows of a dataset file, each with the line it stands on.

A broken line is a DataError with file, line, column and an excerpt. Lines are cut at ``\\n`` bytes
alone (JSON strings may hold other separators). An array is read item by item, so a broken item is
named by its line too; what follows one cannot be told apart and is never skipped.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError
from roundpipe.finetune.settings.fields import DatasetEntry
from roundpipe.finetune.settings.parse import near_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = dict[str, Any]

_NOT_YET = (".csv", ".tsv", ".parquet", ".arrow", ".txt", ".feather", ".xlsx", ".zip", ".zst")
_EXCERPT = 30  # characters shown on each side of the place


def read_rows(
    entry: DatasetEntry | str, *, on_bad_line: Callable[[DataError], None] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) for each object of a .jsonl or .json file, gzipped or not.

    With ``on_bad_line`` a broken line is handed there and left out. Raises DataError for a file
    that is missing, of another kind, damaged or without any row.
    """
    entry = DatasetEntry.model_validate({"path": entry}) if isinstance(entry, str) else entry
    path = Path(entry.path).expanduser()
    suffix = _check_file(path, entry.path)
    rows = _array_or_lines(path, on_bad_line) if suffix == ".json" else _lines(path, on_bad_line)
    count = 0
    for line, row in rows:
        if entry.max_samples is not None and count >= entry.max_samples:
            return
        count += 1
        yield line, row
    if count == 0:
        raise DataError(f"no rows: {entry.path} is empty\nhint: one JSON object a line")


def _check_file(path: Path, given: str) -> str:
    suffixes = [part.lower() for part in path.suffixes]
    suffix = next((part for part in reversed(suffixes) if part != ".gz"), "")
    if path.is_dir():
        raise DataError(f"not yet: a folder as dataset: {given}\nhint: {_example(path)}")
    if suffix in _NOT_YET:
        raise DataError(
            f"not yet: {suffix} files: {given}\nhint: save it as .jsonl, one JSON object a line"
        )
    if not path.exists():
        if suffix in (".json", ".jsonl"):
            raise DataError(f"no such dataset file: {given}\nhint: {near_file(path)}")
        raise DataError(
            f"no such dataset file: {given} (hub ids are not supported yet)"
            "\nhint: dataset=FILE.jsonl"
        )
    if suffix not in (".json", ".jsonl"):
        raise DataError(
            f"unknown kind of file: {given}\nhint: name it .jsonl if it has one JSON object a line"
        )
    return suffix


def _example(folder: Path) -> str:
    files = sorted(folder.glob("*.json*"))
    return f"dataset={files[0]}" if files else "give a .jsonl file in it"


def _read(path: Path) -> bytes:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        return file.read()


def _lines(
    path: Path, on_bad_line: Callable[[DataError], None] | None
) -> Iterator[tuple[int, Row]]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        number = 0
        try:
            for raw in file:
                number += 1
                content = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if not content.strip():
                    continue
                try:
                    row = _parse_line(content, path, number)
                except DataError as problem:
                    if on_bad_line is None:
                        raise
                    on_bad_line(problem)
                    continue
                yield number, row
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise _damaged(path, number, problem) from problem


def _parse_line(raw: bytes, path: Path, number: int) -> Row:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"not UTF-8: {path}, line {number}, byte {problem.start + 1}"
            f"\nhint: {_excerpt(raw.decode('utf-8', 'replace'), problem.start)}"
        ) from problem
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise _broken(path, number, problem.pos, text, problem.msg) from problem
    except RecursionError as problem:
        raise _broken(path, number, 0, text, "nested too deeply") from problem
    return _checked(value, path, number)


def _array_or_lines(
    path: Path, on_bad_line: Callable[[DataError], None] | None
) -> Iterator[tuple[int, Row]]:
    """A .json file holds an array, or, as many do, one object a line."""
    try:
        raw = _read(path).removeprefix(b"\xef\xbb\xbf")
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise _damaged(path, 0, problem) from problem
    if raw.lstrip()[:1] != b"[":
        if raw.lstrip().partition(b"\n")[0].strip() == b"{":
            raise DataError(
                f"not a list of rows: {path} holds one object"
                "\nhint: an array of objects, or one object a line"
            )
        yield from _lines(path, on_bad_line)
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise DataError(f"not UTF-8: {path}, line {line}\nhint: save it as UTF-8") from problem
    yield from _items(path, text)


def _items(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    decoder = json.JSONDecoder()
    start = text.index("[")
    position, line = _skip_space(text, start + 1, 1 + text.count("\n", 0, start))
    while text[position : position + 1] != "]":
        start = line
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as problem:
            raise _broken(path, problem.lineno, problem.pos, text, problem.msg) from problem
        line += text.count("\n", position, end)
        yield start, _checked(value, path, start)
        position, line = _skip_space(text, end, line)
        mark = text[position : position + 1]
        if mark == ",":
            position, line = _skip_space(text, position + 1, line)
        elif mark != "]":
            raise _broken(path, line, position, text, "Expecting ',' or ']'")


def _skip_space(text: str, position: int, line: int) -> tuple[int, int]:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        line += text[position] == "\n"
        position += 1
    return position, line


def _checked(value: Any, path: Path, line: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"not an object: {path}, line {line}: {_excerpt(json.dumps(value), 0)}"
            '\nhint: {"question": …, "answer": …}'
        )
    return value


def _broken(path: Path, line: int, position: int, text: str, why: str) -> DataError:
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return DataError(
        f"broken JSON: {path}, line {line}, column {column}: {why[:1].lower() + why[1:]}: "
        f"{_excerpt(text, position)}\nhint: on_bad_line=skip leaves such lines out"
    )


def _excerpt(text: str, position: int) -> str:
    start, end = max(0, position - _EXCERPT), position + _EXCERPT
    shown = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{shown}{'…' if end < len(text.rstrip()) else ''}"


def _damaged(path: Path, line: int, problem: Exception) -> DataError:
    return DataError(
        f"damaged gzip file: {path}, after line {line}: {str(problem).lower()}"
        "\nhint: copy or compress it again"
    )
