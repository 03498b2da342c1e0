"""The `datasets` library itself: what it saves and loads, and what it says where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data.hub import HubRows, load_from_hub
from roundpipe.finetune.data.rows import open_rows, read_rows
from roundpipe.finetune.settings.entry import DatasetEntry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.accept, pytest.mark.filterwarnings("default")]

ROWS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}]}
    for i in range(50)
]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    # Progress bars leave a thread running.
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    return datasets


def entry(path: Any, **more: Any) -> DatasetEntry:
    return DatasetEntry.model_validate({"path": str(path), **more})


def answers(rows: Any) -> list[str]:
    return [row.values["messages"][1]["content"] for row in rows]


def test_what_the_library_saves_is_read_in_its_order(tmp_path: Path, library: Any) -> None:
    data = library.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one", num_shards=3)
    assert answers(read_rows(str(tmp_path / "one"))) == [str(i) for i in range(50)]
    shuffled = data.shuffle(seed=1)
    splits = library.DatasetDict({"train": shuffled.select(range(10)), "test": data})
    splits.save_to_disk(tmp_path / "two")
    expected = [row["messages"][1]["content"] for row in shuffled.select(range(10))]
    assert answers(read_rows(str(tmp_path / "two"))) == expected
    assert len(list(read_rows(entry(tmp_path / "two", split="test")))) == 50


def test_what_the_library_loads_has_its_rows_and_files(tmp_path: Path, library: Any) -> None:
    (tmp_path / "data").mkdir()
    library.Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    source = HubRows(load_from_hub(entry(tmp_path / "data", split="train[10%:20%]")), "x")
    assert answers(source.rows(lambda *_: None, lambda read: None)) == list("56789")
    assert source.count() == 5
    assert source.num_bytes > 0
    with pytest.raises(DataError, match="has no split test; there are: train"):
        load_from_hub(entry(tmp_path / "data", split="test"))
    with pytest.raises(DataError, match="has no configuration x; there are: default"):
        load_from_hub(entry(tmp_path / "data", name="x"))


def test_offline_and_unknown_is_said(library: Any) -> None:
    with pytest.raises(DataError, match="offline, and the dataset is not kept on this machine"):
        open_rows(entry("nobody/nothing-here"))
