from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
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
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(path.suffix[1:])
    path.write_bytes(pack(content) if pack else content)
    return str(path)


def found(path: str, **more: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(row.place.number, row.values) for row in read_rows(path, **more)]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.JSONL", "a.jsonl.bz2", "a.ndjson.xz"],
)
def test_lines_are_rows_with_their_number(name: str, tmp_path: Path) -> None:
    assert found(write(tmp_path, name, LINES)) == list(enumerate(ROWS, 1))


def test_an_array_is_rows_with_the_line_each_starts_on(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", b'\n[ {"text": "a"},\n\n {"text":\n "b"} ,{"text":"c"}\n]\n')
    assert found(path) == [(2, {"text": "a"}), (4, {"text": "b"}), (5, {"text": "c"})]


def test_blank_lines_marks_and_line_separators_in_strings_do_no_harm(tmp_path: Path) -> None:
    row = json.dumps({"text": "a\u2028b"}, ensure_ascii=False).encode()
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n" + row)
    assert found(path) == [(1, {"text": "a\u2028b"}), (4, {"text": "a\u2028b"})]


def test_max_samples_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", LINES + b"broken")
    entry = DatasetEntry.model_validate({"path": path, "max_samples": 2})
    assert [row.place.number for row in read_rows(entry)] == [1, 2]


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
        ("a.csv", b"", "no rows: .* is empty"),
        ("a.csv", b"a,b\n", "no rows: .* is empty"),
        ("a.txt", b"\n\n", "no rows: .* is empty"),
        ("a.xlsx", b"PK", "a spreadsheet, not a file of rows"),
        ("a.jsonl.zip", b"PK", "an archive, not a file of rows"),
        ("a.jsonl", b"\xff\xfe{\x00", "not UTF-8: .*line 1, byte 1\nhint: .*UTF-16"),
        ("a.jsonl", LINES + b"\x00" * 100, "broken JSON: .*, line 4, column 1"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', "broken JSON: .*, line 2, column 1: extra data"),
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


def test_bad_lines_can_be_handed_over_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b'{"a": 1}\nbroken\n3\n{"a": 2}\n')
    bad: list[Any] = []

    def report(problem: DataError, place: Any, raw: bytes | None) -> None:
        bad.append((str(place), raw, str(problem)))

    assert found(path, report=report) == [(1, {"a": 1}), (4, {"a": 2})]
    assert [line for line, _, _ in bad] == [f"{path}, line 2", f"{path}, line 3"]
    assert [raw for _, raw, _ in bad] == [b"broken\n", b"3\n"]
    assert found(write(tmp_path, "b.jsonl", b"x\ny\n"), report=report) == []


def test_items_of_an_array_that_are_no_rows_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", b'[{"a": 1},\n3,\n{"a": 2}]')
    bad: list[str] = []
    rows = found(path, report=lambda problem, place, raw: bad.append(str(place)))
    assert rows == [(1, {"a": 1}), (3, {"a": 2})]
    assert bad == [f"{path}, line 2"]


# packed files


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_packed_file_that_is_cut_off_is_named(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"a.jsonl.{suffix}", LINES * 2000)
    whole = (tmp_path / f"a.jsonl.{suffix}").read_bytes()
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"damaged .* file: {re.escape(path)}: .*\nhint: copy it"):
        found(path)


def test_a_packed_file_that_is_none_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.csv.bz2", "a.txt.xz"):
        (tmp_path / name).write_bytes(LINES)
        with pytest.raises(DataError, match=r"damaged \w+ file"):
            found(str(tmp_path / name))


def test_zstd_is_unpacked(tmp_path: Path) -> None:
    import pyarrow

    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(LINES)
    assert found(str(tmp_path / "a.jsonl.zst")) == list(enumerate(ROWS, 1))
    (tmp_path / "b.jsonl.zst").write_bytes(LINES)
    with pytest.raises(DataError, match="damaged zstd file"):
        found(str(tmp_path / "b.jsonl.zst"))


# arrays that are larger than the window that moves over them


def test_an_array_is_decoded_alike_whatever_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import array_rows

    rows = [{"a": "x" * n, "é": [n, {"b": None}], "c": "\\ud83d\\ude00\n"} for n in range(40)]
    text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    path = write(tmp_path, "a.json", text.encode())
    numbers = [n for n, line in enumerate(text.split("\n"), 1) if line == " {"]
    for size in (1, 2, 7, 64, 4096):
        monkeypatch.setattr(array_rows, "_WINDOW", size)
        assert found(path) == list(zip(numbers, rows, strict=True))


@pytest.mark.parametrize("size", [1, 5, 64, 1 << 18])
@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'[{"a": 1},\n {"a": tru}]', "line 2, column 8: expecting value"),
        (b'[{"a": 1},\n {"a": "x}]', "line 2, column 8: unterminated string"),
        (b'[{"a": 1},\n {"a": 1}', "line 2, column 10: expecting ','"),
        (b'[{"a": 1},\n]', "line 2, column 1: expecting value"),
        (b'[{"a": "\\q"}]', "line 1, column 9: invalid"),
    ],
)
def test_the_place_in_an_array_is_right_whatever_the_window(
    content: bytes, place: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import array_rows

    monkeypatch.setattr(array_rows, "_WINDOW", size)
    with pytest.raises(DataError, match=f"broken JSON: .*, {place}"):
        found(write(tmp_path, "a.json", content))


def test_an_error_in_an_array_is_found_without_reading_on(tmp_path: Path) -> None:
    from roundpipe.finetune.data.array_rows import array_rows
    from roundpipe.finetune.data.files import DataFile
    from roundpipe.finetune.data.problems import stop_at_once

    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size: int = -1) -> bytes:
            self.taken += size
            return b'[{"a": oops, "b": 1}, ' + b'{"a": 1},' * (size // 9)

    stream = Endless()
    file = DataFile(tmp_path / "a.json", "a.json", "json")
    with pytest.raises(DataError, match="line 1, column 8"):
        list(array_rows(stream, file, stop_at_once))
    assert stream.taken <= 1 << 19


# CSV and text


def test_csv_cells_are_text_and_may_hold_line_breaks(tmp_path: Path) -> None:
    text = 'question,answer,n\r\n"a, ""b""\nc",72,\r\n\r\nd,e,1\r\n'
    path = write(tmp_path, "a.csv", b"\xef\xbb\xbf" + text.encode())
    assert found(path) == [
        (2, {"question": 'a, "b"\nc', "answer": "72", "n": ""}),
        (5, {"question": "d", "answer": "e", "n": "1"}),
    ]


@pytest.mark.parametrize(
    ("name", "mark"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t")]
)
def test_what_parts_the_columns_is_read_off_the_first_line(
    name: str, mark: str, tmp_path: Path
) -> None:
    text = f"question{mark}answer\na{mark}b\n"
    assert found(write(tmp_path, name, text.encode())) == [(2, {"question": "a", "answer": "b"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b,a\n1,2,3\n", r"a column twice: a \(.*line 1\)"),
        (b"a,b\n1,2\n1,2,3\n", "3 cells under 2 columns: .*, line 3\nhint: put text"),
        (b"a,b\n1,2\n1\n", "1 cells under 2 columns: .*, line 3"),
        (b'a,b\n1,"2" x\n', "broken CSV: .*, line 2: .*\nhint: a quote inside"),
        (b'a,b\n1,2\n1,"2\n3,4\n', "broken CSV: .*, line 3: unexpected end of data"),
        (b"a,b\n1,2\n1,caf\xe9\n", "not UTF-8: .*, line 3, byte 4"),
    ],
)
def test_a_broken_csv_file_is_named_by_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        found(write(tmp_path, "a.csv", content))


def test_a_broken_csv_row_can_be_left_out(tmp_path: Path) -> None:
    bad: list[tuple[int, bytes | None]] = []
    path = write(tmp_path, "a.csv", b'a,b\n1,2\n3,"4" x\n5\n\xe9,6\n7,8\n')
    rows = found(path, report=lambda problem, place, raw: bad.append((place.number, raw)))
    assert rows == [(2, {"a": "1", "b": "2"}), (6, {"a": "7", "b": "8"})]
    assert bad == [(3, b'3,"4" x\n'), (4, b"5\n"), (5, b"\xe9,6\n")]


def test_a_cell_may_be_longer_than_the_csv_module_likes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", b"a,b\n" + b"x" * 200_000 + b",1\n")
    assert len(found(path)[0][1]["a"]) == 200_000


def test_a_line_of_text_is_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\n\n  \n two \nthree")
    assert found(path) == [(1, {"text": "one"}), (4, {"text": " two "}), (5, {"text": "three"})]


def test_a_line_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import text_rows

    monkeypatch.setattr(text_rows, "LONGEST", 1 << 20)
    with pytest.raises(DataError, match=r"a line of more than 1 MB: .*, line 2"):
        found(write(tmp_path, "a.jsonl", b'{"a": 1}\n' + b'"' * (1 << 20)))


def test_an_excerpt_never_shows_megabytes_or_control_characters(tmp_path: Path) -> None:
    line = b'{"a": "' + b"x" * 1_000_000 + b"\x1b[2J" + b"y" * 1_000_000
    with pytest.raises(DataError) as caught:
        found(write(tmp_path, "a.jsonl", line))
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)


# how far reading is


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_reading_says_how_far_it_is(name: str, tmp_path: Path) -> None:
    line = json.dumps({"a": "x" * 2000})
    text = f"[{','.join([line] * 1500)}]" if name == "a.json" else f"{line}\n" * 1500
    text = text.replace('"', "").replace(": ", "") if name == "a.csv" else text
    path = write(tmp_path, name, text.encode())
    seen: list[int] = []
    found(path, show=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == (tmp_path / name).stat().st_size
    assert len(seen) > 2 or name.endswith(".gz")
