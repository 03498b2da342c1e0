"""How long a job's data is, told from a part of it."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.forecast.data import DataSize, count_rows, local_tokenizer, measure_data
from roundpipe.finetune.settings.config import make_config

if TYPE_CHECKING:
    from pathlib import Path


def config(path: Path, **more: Any):
    return make_config({"model": "m", "dataset": str(path), **more})[0]


def rows(count: int) -> str:
    return "".join(json.dumps({"text": "x" * (i % 7)}) + "\n" for i in range(1, count + 1))


def test_rows_are_counted_by_lines_also_in_gzip_and_arrays(tmp_path: Path) -> None:
    plain, packed, array = (tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.json"))
    plain.write_text(rows(10) + "\n\n")
    packed.write_bytes(gzip.compress(rows(20).encode()))
    array.write_text(json.dumps([json.loads(line) for line in rows(5).splitlines()]))
    counts = [count_rows(config(path).dataset[0]) for path in (plain, packed, array)]
    assert counts == [10, 20, 5]
    few = config(plain, dataset=[{"path": str(plain), "max_samples": 3}]).dataset[0]
    assert count_rows(few) == 3


def test_a_batch_is_as_long_as_its_longest_sample() -> None:
    data = DataSize(4, (10, 20, 30, 40), is_exact=True)
    assert data.padded_length(1) == pytest.approx(25)
    # Of all pairs; drawn are a few.
    assert data.padded_length(2) == pytest.approx((1 * 20 + 2 * 30 + 3 * 40) / 6, rel=0.1)
    assert data.padded_length(4) == data.padded_length(100) == 40
    assert DataSize(1, (7,), is_exact=True).padded_length(8) == 7


def test_each_microbatch_is_as_long_as_its_own_longest_sample() -> None:
    data = DataSize(4, (10, 20, 30, 40), is_exact=True)
    assert data.padded_length(4, 2) == (2 * 40 + 2 * 20) / 4
    assert data.padded_length(4, 4) == data.padded_length(4, 9) == 25


def test_rows_of_other_kinds_of_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"a\nb"\nc\n')
    (tmp_path / "b.txt").write_text("one\n\ntwo\nthree\n")
    counts = [count_rows(config(tmp_path / name).dataset[0]) for name in ("a.csv", "b.txt")]
    assert counts == [2, 3]
    (tmp_path / "in").mkdir()
    for name in ("train-1.jsonl", "train-2.jsonl", "test.jsonl"):
        (tmp_path / "in" / name).write_text(rows(4))
    assert count_rows(config(tmp_path / "in").dataset[0]) == 8


def test_rows_of_a_very_large_file_are_told_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import rows as reading

    monkeypatch.setattr(reading, "_COUNTED", 1)
    monkeypatch.setattr(reading, "_ENOUGH_ROWS", 2000)
    file = tmp_path / "d.jsonl"
    file.write_text((json.dumps({"text": "x" * 1000}) + "\n") * 4000)
    assert count_rows(config(file).dataset[0]) == pytest.approx(4000, rel=0.1)


def test_an_epoch_sees_samples_as_often_as_their_weight_says(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(rows(100))
    asked = config(file, dataset=[{"path": str(file), "weight": 0.5}, str(file)])
    data = measure_data(asked, None)
    assert (data.samples, data.rows) == (200, 150)


def test_packed_rows_are_what_a_step_takes(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text((json.dumps({"text": "x" * 40}) + "\n") * 100)
    data = measure_data(config(file, packing=True, max_length=50, batch_size=2, epochs=1), None)
    assert (data.samples, data.rows) == (100, 20)
    assert set(data.lengths) == {50}
    assert data.steps(config(file, packing=True, max_length=50, batch_size=2, epochs=1)) == 10


def test_steps_are_those_that_training_would_make(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(rows(100))
    data = measure_data(config(file), None)
    assert data.samples == 100
    assert not data.is_exact
    assert data.steps(config(file, batch_size=16, epochs=3)) == 21
    assert data.steps(config(file, batch_size=16, max_steps=5)) == 5
    assert data.steps(config(file, batch_size=16, epochs=1, val_size=0.5)) == 4


def test_lengths_are_cut_at_max_length(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"text": "word " * 1000}) + "\n")
    assert measure_data(config(file, max_length=64), None).lengths == (64,)


def test_a_missing_file_is_said_as_training_says_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such dataset file"):
        measure_data(config(tmp_path / "no.jsonl"), None)


def test_a_model_that_is_not_on_this_machine_has_no_tokenizer() -> None:
    assert local_tokenizer("nobody/xyzzy") is None
    assert local_tokenizer("a/b/c") is None


@pytest.mark.slow  # imports torch and transformers
def test_with_a_tokenizer_samples_are_those_of_training(tiny_folder: Path, tiny_data: Path) -> None:
    from roundpipe.finetune.data.dataset import load_dataset

    tokenizer = local_tokenizer(str(tiny_folder))
    asked = config(tiny_data)
    data = measure_data(asked, tokenizer)
    samples = load_dataset(asked, tokenizer).samples
    assert data.is_exact
    assert data.samples == len(samples)
    assert list(data.lengths) == sorted(len(sample.input_ids) for sample in samples)
