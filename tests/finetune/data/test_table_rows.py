"""Every shape in every kind of file means the same."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data.rows import open_rows, read_rows
from roundpipe.finetune.data.shapes import shape_of, understand
from roundpipe.finetune.settings.entry import DatasetEntry

pa = pytest.importorskip("pyarrow")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {
            "messages": [
                {"role": "user", "content": "q é"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "r"},
                {"role": "assistant", "content": "", "tool_calls": [OTHER]},
                {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            ]
        },
    ],
    "conversations": [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a\nb"}]},
        {"conversations": [{"from": "human", "value": "r"}, {"from": "gpt", "value": "c"}]},
    ],
    "prompt/completion": [{"prompt": "p", "completion": "c,d"}, {"prompt": "q", "completion": "e"}],
    "instruction/output": [
        {"instruction": "i", "input": "", "output": "o", "system": "s", "history": [["q", "a"]]},
        {"instruction": "j", "input": "k", "output": "o", "system": "", "history": []},
    ],
    "question/answer": [{"question": "q\n", "answer": "72"}, {"question": "r", "answer": '"b"'}],
    "query/response": [{"query": "q", "response": "a"}],
    "text": [{"text": "one"}, {"text": "two;three"}],
    "input_ids": [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [4, 5], "labels": [-100, 5], "attention_mask": [1, 1]},
    ],
}


def jsonl(rows: list[Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def as_csv(rows: list[Any], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    for row in rows:
        cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
        writer.writerow(cells)
    return text.getvalue().encode()


def parquet(rows: list[Any]) -> bytes:
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def arrow(rows: list[Any], new: str = "new_file") -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with getattr(pa.ipc, new)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return sink.getvalue()


KINDS: dict[str, Callable[[list[Any]], bytes]] = {
    "a.jsonl": jsonl,
    "a.json": lambda rows: json.dumps(rows, indent=2).encode(),
    "a.csv": as_csv,
    "a.tsv": lambda rows: as_csv(rows, "\t"),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "stream.arrow": lambda rows: arrow(rows, "new_stream"),
    "a.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)),
    "a.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
    "a.arrow.gz": lambda rows: gzip.compress(arrow(rows)),
}


def meanings(path: Path) -> list[Any]:
    rows = [row.values for row in read_rows(str(path))]
    return [understand(row, shape_of(row)) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_reads_alike_from_every_kind_of_file(
    shape: str, kind: str, tmp_path: Path
) -> None:
    rows = SHAPES[shape]
    (tmp_path / kind).write_bytes(KINDS[kind](rows))
    assert meanings(tmp_path / kind) == [understand(row, shape) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_without_reading_what_they_say(kind: str, tmp_path: Path) -> None:
    rows = [{"question": str(i), "answer": "a"} for i in range(5)]
    (tmp_path / kind).write_bytes(KINDS[kind](rows))
    entry = DatasetEntry.model_validate({"path": str(tmp_path / kind)})
    assert open_rows(entry).count() == 5
    some = entry.model_copy(update={"split": "train[3:9]"})
    assert open_rows(some).count() == 2


def test_types_of_arrow_that_mean_text_are_text(tmp_path: Path) -> None:
    for number, kind in enumerate(
        (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))
    ):
        values = pa.array(["a", "b", "a"], pa.string()).cast(kind)
        table = pa.table({"text": values})
        path = tmp_path / f"{number}.arrow"
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        assert [row.values for row in read_rows(str(path))] == [{"text": t} for t in "aba"]


def test_null_cells_are_named_by_row_and_null_fields_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "q", "name": None}], "x": {"a": [None, 1]}},
        {"messages": [{"role": "user", "content": "r", "name": "n"}], "x": None},
    ]
    path.write_bytes(parquet(rows))
    found = list(read_rows(str(path)))
    assert found[0].values == {
        "messages": [{"role": "user", "content": "q"}],
        "x": {"a": [None, 1]},
    }
    assert found[1].values["x"] is None
    assert str(found[1].place) == f"{path}, row 2"


@pytest.mark.parametrize("kind", ["a.parquet", "a.arrow", "stream.arrow", "a.parquet.gz"])
def test_a_damaged_table_is_named(kind: str, tmp_path: Path) -> None:
    rows = [{"question": "q" * 1000, "answer": str(i)} for i in range(50)]
    whole = KINDS[kind](rows)
    path = tmp_path / kind
    for broken in (b"", b"PAR1", whole[: len(whole) // 2], b"\x00" * 100):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"damaged \w+ file: .*a|no rows"):
            list(read_rows(str(path)))


def test_a_large_batch_becomes_python_objects_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import table_rows

    monkeypatch.setattr(table_rows, "ROWS", 3)
    sizes: list[int] = []
    plain = pa.RecordBatch.to_pylist

    class Batch:
        def __init__(self, batch: Any) -> None:
            self.batch, self.num_rows = batch, batch.num_rows

        def slice(self, start: int, length: int) -> Any:
            return Batch(self.batch.slice(start, length))

        def to_pylist(self) -> Any:
            sizes.append(self.num_rows)
            return plain(self.batch)

    batch = pa.RecordBatch.from_pylist([{"n": i} for i in range(8)])
    rows = list(table_rows.batch_rows([Batch(batch), Batch(batch.slice(0, 1))], "a"))
    assert [row.values["n"] for row in rows] == [*range(8), 0]
    assert [row.place.number for row in rows] == list(range(1, 10))
    assert sizes == [3, 3, 2, 1]


# folders of save_to_disk


def saved(folder: Path, names: list[str], rows: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in zip(names, rows, strict=True):
        (folder / name).write_bytes(arrow([row], "new_stream"))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read_in_the_order_it_lists(tmp_path: Path) -> None:
    saved(tmp_path, ["b.arrow", "a.arrow"], [{"text": "1"}, {"text": "2"}])
    assert [row.values["text"] for row in read_rows(str(tmp_path))] == ["1", "2"]


def test_a_saved_dataset_has_its_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / split, ["a.arrow"], [{"text": split}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row.values["text"] for row in read_rows(str(tmp_path))] == ["train"]
    entry = DatasetEntry.model_validate({"path": str(tmp_path), "split": "test"})
    assert [row.values["text"] for row in read_rows(entry)] == ["test"]
    with pytest.raises(DataError, match=r"no split dev in the folder: .*; there are: train, test"):
        list(read_rows(entry.model_copy(update={"split": "dev"})))


def test_a_saved_dataset_that_is_not_whole_is_named(tmp_path: Path) -> None:
    saved(tmp_path, ["a.arrow", "b.arrow"], [{"text": "1"}, {"text": "2"}])
    (tmp_path / "b.arrow").unlink()
    with pytest.raises(DataError, match=r"a file of the dataset is missing: .*b\.arrow"):
        list(read_rows(str(tmp_path)))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"not what save_to_disk writes: .*state\.json"):
        list(read_rows(str(tmp_path)))
