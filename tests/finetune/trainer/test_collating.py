"""Batches that a user's collator makes go to the model as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import pytest
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    TrainingArguments,
    default_data_collator,
)

from roundpipe.errors import ConfigError
from roundpipe.finetune.trainer.arguments import read_arguments
from roundpipe.finetune.trainer.collating import CollatorBatches
from roundpipe.finetune.trainer.datasets import Data, Preparing
from roundpipe.finetune.trainer.setting_up import tokenizer_from

if TYPE_CHECKING:
    from types import ModuleType

ROWS = [{"input_ids": list(range(5, 9 + i)), "attention_mask": [1] * (4 + i)} for i in range(4)]


def prepared(tiny: ModuleType, rows: Any, collator: Any, args: Any = None) -> Data:
    args = args or TrainingArguments("out", use_cpu=True)
    told = read_arguments(args, "some/model", train_dataset=rows, environment={})
    return Preparing(told, tiny.tiny_tokenizer(), data_collator=collator).data(rows)


def batch_of(data: Data, *rows: int) -> dict[str, torch.Tensor]:
    assert data.collating is not None
    return data.collating.batch(data.dataset.samples, [(row,) for row in rows])


def test_transformers_collators_make_the_labels(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()
    data = prepared(tiny, ROWS, DataCollatorForLanguageModeling(tokenizer, mlm=False))
    batch = batch_of(data, 0, 3)
    want = DataCollatorForLanguageModeling(tokenizer, mlm=False)([ROWS[0], ROWS[3]])
    assert batch.keys() == want.keys()
    assert all(torch.equal(batch[name], want[name]) for name in want)
    assert data.collating is not None
    assert data.collating.tokens_in(batch) == 4 + 7


def test_labels_of_the_rows_are_padded_by_the_collator_for_it(tiny: ModuleType) -> None:
    rows = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in ROWS]
    tokenizer = tiny.tiny_tokenizer()
    batch = batch_of(prepared(tiny, rows, DataCollatorForSeq2Seq(tokenizer)), 0, 1)
    assert batch["labels"].tolist() == [[-100, 6, 7, 8, -100], [-100, 6, 7, 8, 9]]


def test_trls_collator_flattens_rows_and_names_no_kernels(tiny: ModuleType) -> None:
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    collator = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = batch_of(prepared(tiny, ROWS, collator), 0, 1)
    assert batch["input_ids"].shape == (1, 9)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}


def test_a_collator_gets_prepared_samples_where_rows_are_text(tiny: ModuleType) -> None:
    seen: list[Any] = []

    def collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(rows)
        ids = torch.tensor([row["input_ids"][:3] for row in rows])
        return {"input_ids": ids, "labels": ids}

    batch_of(prepared(tiny, [{"text": "some"}, {"text": "words"}], collator), 0, 1)
    assert [row.keys() for row in seen] == [{"input_ids", "labels"}] * 2


def test_a_collator_gets_rows_of_any_kind_if_no_column_is_to_be_removed(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()

    def collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made = tokenizer([row["wild"] for row in rows], padding=True, return_tensors="pt")
        return {**made, "labels": made["input_ids"]}

    args = TrainingArguments("out", use_cpu=True, remove_unused_columns=False)
    data = prepared(tiny, [{"wild": "a b"}, {"wild": "c"}], collator, args)
    assert batch_of(data, 0, 1)["input_ids"].shape == (2, 3)


def test_columns_that_no_model_knows_are_removed(tiny: ModuleType) -> None:
    rows = datasets.Dataset.from_list([{**row, "name": "x"} for row in ROWS])
    data = prepared(tiny, rows, default_data_collator)
    assert set(data.dataset.samples[0]) == {"input_ids", "attention_mask"}
    args = TrainingArguments("out", use_cpu=True, remove_unused_columns=False)
    assert "name" in prepared(tiny, rows, default_data_collator, args).dataset.samples[0]


def test_rows_that_stay_tell_what_a_run_asks(tiny: ModuleType) -> None:
    data = prepared(tiny, ROWS, default_data_collator)
    samples = data.dataset.samples
    assert samples.lengths.tolist() == [4, 5, 6, 7]
    assert data.dataset.stats.tokens == 22
    assert sorted(row for (row,) in data.order.rows(1)) == [0, 1, 2, 3]
    assert data.dataset.describe()
    again = prepared(tiny, datasets.Dataset.from_list(ROWS), default_data_collator)
    assert samples.digest == again.dataset.samples.digest
    assert samples.digest != prepared(tiny, ROWS[1:], default_data_collator).dataset.samples.digest


def test_what_is_no_batch_is_refused_by_name() -> None:
    samples = [{"input_ids": [1]}]
    for made, said in (([1], "returned a list"), ({"input_ids": torch.ones(1)}, "made no labels")):
        with pytest.raises(ConfigError, match=said):
            CollatorBatches(lambda rows, made=made: made).batch(samples, [(0,)])  # type: ignore[misc]


def test_packing_and_a_collator_exclude_each_other(tiny: ModuleType) -> None:
    with pytest.raises(ConfigError, match="data_collator"):
        prepared(tiny, ROWS, default_data_collator, {"packing": True})


def _split(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    cut = CollatorBatches(default_data_collator).split(None)
    return list(cut((), batch, count)[1])


def test_rows_padded_on_the_right_are_cut_to_their_length() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    ids = torch.arange(8).view(2, 4)
    parts = _split({"input_ids": ids, "labels": ids, "attention_mask": mask}, 2)
    assert [part["input_ids"].shape for part in parts] == [(1, 4), (1, 1)]


def test_rows_padded_on_the_left_are_cut_in_their_order() -> None:
    mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    ids = torch.arange(12).view(3, 4)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    for given in (batch, {**batch, "flag": True}):
        parts = _split(given, 2)
        assert torch.equal(torch.cat([part["input_ids"] for part in parts]), ids)
    assert all(part["flag"] is True for part in parts)
    assert [len(part["labels"]) for part in _split({"labels": ids, "input_ids": ids}, 5)] == [1] * 3


def test_a_tokenizer_comes_alone_or_in_a_processor(tiny: ModuleType) -> None:
    tokenizer = tiny.tiny_tokenizer()

    class Processor:
        def __init__(self) -> None:
            self.tokenizer = tokenizer

    assert tokenizer_from(tokenizer) is tokenizer
    assert tokenizer_from(Processor()) is tokenizer
    assert tokenizer_from(None) is None
    with pytest.raises(ConfigError, match="no tokenizer"):
        tokenizer_from(3)
