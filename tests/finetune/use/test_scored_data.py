from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.finetune.tiny_model import tiny_tokenizer

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.dataset import load_dataset
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.settings.config import TrainConfig, make_config
from roundpipe.finetune.use.eval_wish import Choice
from roundpipe.finetune.use.request import NO_DATA
from roundpipe.finetune.use.scored_data import ScoredData, load_scored, scored_config

if TYPE_CHECKING:
    from pathlib import Path

THE_RUNS = Choice()  # the data that the run has evaluated on


def config(**changes: Any) -> TrainConfig:
    return make_config({"model": "-", "dataset": "train.jsonl", **changes})[0]


def paths(settings: TrainConfig, choice: Choice) -> list[str]:
    return [entry.path for entry in scored_config(settings, choice).dataset]


def load(settings: TrainConfig, choice: Choice = THE_RUNS) -> ScoredData:
    chosen = scored_config(settings, choice)
    return load_scored(chosen, choice, tiny_tokenizer(), Terminal(io.StringIO()), environment={})


def test_what_the_run_has_evaluated_on_counts_unless_data_are_named() -> None:
    settings = config(eval_dataset=["a.jsonl", "b.jsonl"])
    assert paths(settings, Choice()) == ["a.jsonl", "b.jsonl"]
    assert paths(settings, Choice(is_named=True)) == ["train.jsonl"]
    assert paths(config(val_size=4), Choice()) == ["train.jsonl"]
    assert scored_config(config(val_size=4), Choice()).val_size == 4
    assert scored_config(config(val_size=4), Choice(is_named=True)).val_size is None


@pytest.mark.parametrize("choice", [Choice(), Choice(is_named=True), Choice(is_held_out=True)])
def test_without_any_data_a_dataset_is_asked_for(choice: Choice) -> None:
    with pytest.raises(ConfigError, match=r"no data to score on.*\nhint: dataset=FILE"):
        scored_config(config(dataset=NO_DATA), choice)


def test_a_run_that_held_nothing_out_is_not_scored_on_what_it_was_trained_on_by_surprise() -> None:
    with pytest.raises(
        ConfigError, match=r"neither eval_dataset nor val_size\nhint: .*train\.jsonl"
    ):
        scored_config(config(), Choice())


def test_a_split_and_a_number_of_samples_go_to_the_data() -> None:
    settings = config(eval_dataset=[{"path": "a.jsonl", "max_samples": 5}, "b.jsonl"])
    chosen = scored_config(settings, Choice(split="test", most=7)).dataset
    assert [(each.split, each.max_samples) for each in chosen] == [("test", 5), ("test", 7)]
    held_out = scored_config(config(val_size=4), Choice(most=2)).dataset
    assert held_out[0].max_samples is None  # which rows are held out hangs on all of them


def test_held_out_samples_are_those_of_the_run(tiny_data: Path) -> None:
    settings = config(dataset=str(tiny_data), val_size=4, data_seed=5)
    its_own = load_dataset(settings, tiny_tokenizer()).eval_samples
    assert list(load(settings).samples) == list(its_own)
    assert list(load(settings, Choice(most=3)).samples) == list(its_own)[:3]
    assert len(load(settings, Choice(most=9)).samples) == 4


def test_samples_are_cut_and_masked_as_in_the_run(tiny_data: Path) -> None:
    settings = config(eval_dataset=str(tiny_data), max_length=50, train_on_prompt=True)
    data = load(settings)
    assert max(len(sample) for sample in data.samples) == 50
    assert data.samples[0].labels[1] != -100
    assert any(line.endswith("cut at max_length 50") for line in data.lines)
    assert (data.name, data.stats.samples) == (str(tiny_data), 12)
    assert data.shapes == ((str(tiny_data), "question/answer"),)


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n{"question": "a", "ans\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2"):
        load(config(eval_dataset=str(path)))


def test_the_data_are_named_with_their_split_and_how_much_of_them_it_is(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        row = {"question": split, "answer": split}
        (tmp_path / "d" / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    folder = str(tmp_path / "d")
    data = load(config(eval_dataset=folder), Choice(split="test"))
    assert data.name == f"{folder} (test)"
    assert "user\ntest" in tiny_tokenizer().decode(data.samples[0].input_ids)
    held_out = load(config(dataset=folder, val_size=0.5), Choice(split="train"))
    assert held_out.name == f"{folder} (train), of which val_size=0.5"
