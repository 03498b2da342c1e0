from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data.rows import read_rows
from roundpipe.finetune.settings.config import DatasetEntry

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"text": "a"}, {"text": "b c"}, {"text": "é"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.JSONL"])
def test_lines_are_rows_with_their_number(name: str, tmp_path: Path) -> None:
    assert list(read_rows(write(tmp_path, name, LINES))) == list(enumerate(ROWS, 1))


def test_an_array_is_rows_with_the_line_each_starts_on(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", b'\n[ {"text": "a"},\n\n {"text":\n "b"} ,{"text":"c"}\n]\n')
    assert list(read_rows(path)) == [(2, {"text": "a"}), (4, {"text": "b"}), (5, {"text": "c"})]


def test_blank_lines_marks_and_line_separators_in_strings_do_no_harm(tmp_path: Path) -> None:
    row = json.dumps({"text": "a\u2028b"}, ensure_ascii=False).encode()
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n" + row)
    assert list(read_rows(path)) == [(1, {"text": "a\u2028b"}), (4, {"text": "a\u2028b"})]


def test_max_samples_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", LINES + b"broken")
    entry = DatasetEntry.model_validate({"path": path, "max_samples": 2})
    assert [line for line, _ in read_rows(entry)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "place", "why"),
    [
        (LINES + b'{"text": "x" "y"}\n', "line 4, column 14", "expecting ',' delimiter"),
        (LINES + b'{"text": "x', "line 4, column 10", "unterminated string"),
        (b"\n\nnot json\n", "line 3, column 1", "expecting value"),
        (b'{"a": 1}{"a": 2}\n', "line 1, column 9", "extra data"),
    ],
)
def test_a_broken_line_is_named_by_line_and_column(
    content: bytes, place: str, why: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "a.jsonl", content)
    with pytest.raises(DataError, match=f"broken JSON: {re.escape(path)}, {place}: {why}.*\nhint"):
        list(read_rows(path))


def test_a_broken_line_shows_what_stands_there(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * 200 + b'", oops, "b": "' + b"y" * 200 + b'"}'
    with pytest.raises(DataError, match=r'…x+", oops, "b": "y+…\n'):
        list(read_rows(write(tmp_path, "a.jsonl", long)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n{"a": }]', "broken JSON: .*, line 2, column 7: expecting value"),
        (b'[{"a": 1}\n{"a": 2}]', r"broken JSON: .*, line 2, column 1: expecting ',' or"),
        (b'[{"a": 1},\n', "broken JSON: .*, line 2"),
        (b'[{"a": 1},\n3]', "not an object: .*, line 2: 3"),
        (b'{\n  "data": []\n}', "not a list of rows: .* holds one object"),
        (b"[]", "no rows: .* is empty"),
        (b'[{"a": "\xff"}]', "not UTF-8: .*, line 1"),
    ],
)
def test_a_broken_array_is_named_by_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(write(tmp_path, "a.json", content)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no rows: .* is empty"),
        ("a.jsonl", b"\n \n", "no rows: .* is empty"),
        ("a.json", b"", "no rows: .* is empty"),
        ("a.jsonl", b"[1, 2]\n", r"not an object: .*, line 1: \[1, 2\]"),
        ("a.jsonl", LINES + b'{"a": "\xff"}', "not UTF-8: .*, line 4, byte 8"),
        ("a.jsonl", b'{"a": ' * 100_000, "broken JSON: .*, line 1"),
        ("a.csv", b"a,b\n", r"not yet: \.csv files"),
        ("a.parquet", b"PAR1", r"not yet: \.parquet files"),
        ("a.data", b"{}", "unknown kind of file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(write(tmp_path, name, content)))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz"])
def test_a_damaged_archive_says_so(name: str, tmp_path: Path) -> None:
    whole = gzip.compress(LINES * 50)
    for content in (whole[:-20], b"no gzip at all", whole[:15] + b"\0\0\0" + whole[18:]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="damaged gzip file"):
            list(read_rows(str(tmp_path / name)))


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path, "train.jsonl", LINES)
    with pytest.raises(DataError, match=f"no such dataset file: .*\nhint: {re.escape(path)}"):
        list(read_rows(path.replace("train", "trian")))
    with pytest.raises(DataError, match="hub ids are not supported yet"):
        list(read_rows("someone/dataset"))
    with pytest.raises(DataError, match=f"a folder as dataset.*\nhint: dataset={re.escape(path)}"):
        list(read_rows(str(tmp_path)))


def test_bad_lines_can_be_handed_over_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b'{"a": 1}\nbroken\n3\n{"a": 2}\n')
    bad: list[Any] = []
    assert list(read_rows(path, on_bad_line=bad.append)) == [(1, {"a": 1}), (4, {"a": 2})]
    assert ["line 2" in str(bad[0]), "line 3" in str(bad[1])] == [True, True]
    with pytest.raises(DataError, match="no rows"):
        list(read_rows(write(tmp_path, "b.jsonl", b"x\ny\n"), on_bad_line=bad.append))
