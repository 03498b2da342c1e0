"""A Trainer's datasets become samples: TRL's tokens and labels, whatever object holds the rows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import torch
import tqdm
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchStream

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.samples import IGNORED
from roundpipe.finetune.run.content import data_digest
from roundpipe.finetune.trainer.arguments import read_arguments
from roundpipe.finetune.trainer.collating import features_of
from roundpipe.finetune.trainer.datasets import Data, Preparing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

TEXTS = [{"text": f"text number {i} " * (i + 1)} for i in range(5)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": "so " * (i % 3) + f"what is {i}?"},
            {"role": "assistant", "content": f"it is {i}" * (1 + i % 4)},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "no"},
        ]
    }
    for i in range(5)
]
PAIRS = [{"prompt": f"Q {i}: ", "completion": f"{i} " * (i + 1)} for i in range(5)]
ASKED = [{"prompt": talk["messages"][:1], "completion": talk["messages"][1:2]} for talk in TALKS]
TOKENS = [{"input_ids": list(range(5, 12 + i))} for i in range(5)]
LABELLED = [{**row, "labels": [-100] * 3 + row["input_ids"][3:]} for row in TOKENS]
MASKED = [{**row, "assistant_masks": [0] * 3 + [1] * (len(row["input_ids"]) - 3)} for row in TOKENS]
ANSWERED = [
    {**row, "completion_mask": [0] * 2 + [1] * (len(row["input_ids"]) - 2)} for row in TOKENS
]


@pytest.fixture(autouse=True)
def _without_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of TRL's preparation starts a thread that stays."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def _without_deprecations() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def sft(**fields: Any) -> Any:
    trl = pytest.importorskip("trl")
    return trl.SFTConfig("out", use_cpu=True, bf16=False, report_to="none", **fields)


def prepared(
    tiny: ModuleType, rows: Any, args: Any = None, eval_dataset: Any = None, **how: Any
) -> Data:
    template = how.pop("template", tiny.TEMPLATE)
    told = read_arguments(
        args, "some/model", train_dataset=rows, eval_dataset=eval_dataset, environment={}
    )
    return Preparing(told, tiny.tiny_tokenizer(template=template), **how).data(rows, eval_dataset)


def pairs_of(samples: Any) -> list[tuple[list[int], list[int]]]:
    return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in samples]


def marked(tiny: ModuleType) -> str:
    """The template with marks around answers, as TRL needs them."""
    turn = "{{ m['content'] }}<|im_end|>"
    answer = "{% generation %}" + turn + "{% endgeneration %}"
    either = f"{{% if m['role'] == 'assistant' %}}{answer}{{% else %}}{turn}{{% endif %}}"
    return str(tiny.TEMPLATE).replace(turn + "\n", either + "{{ '\\n' }}")


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        (TEXTS, {"max_length": 16}),
        (TALKS, {}),
        (TALKS, {"assistant_only_loss": True}),
        (PAIRS, {}),
        (ASKED, {}),
        (MASKED, {"max_length": 8}),
        (ANSWERED, {}),
        (ANSWERED, {"completion_only_loss": True}),
        ([{**row, "prompt": "", "completion": ""} for row in ANSWERED], {}),
    ],
    ids=["text", "messages", "answers", "strings", "asked", "masked", "whole", "rest", "pair"],
)
def test_samples_are_those_of_trl_token_by_token(
    tiny: ModuleType, rows: list[Any], fields: dict[str, Any]
) -> None:
    trl = pytest.importorskip("trl")
    held, args = datasets.Dataset.from_list(rows), sft(**fields)
    trainer = trl.SFTTrainer(
        tiny.tiny_model(num_layers=1),
        args,
        train_dataset=held,
        processing_class=tiny.tiny_tokenizer(template=marked(tiny)),
    )
    theirs = [
        (row["input_ids"], [IGNORED, *row["labels"][1:]]) for row in trainer.train_dataset
    ]  # nothing predicts the first
    ours = prepared(tiny, held, args, template=marked(tiny)).dataset
    assert pairs_of(ours.samples) == theirs


def test_completions_or_everything_as_it_is_said(tiny: ModuleType) -> None:
    whole = prepared(tiny, PAIRS, sft(completion_only_loss=False))
    (ids, labels), *_ = pairs_of(whole.dataset.samples)
    assert labels == [IGNORED, *ids[1:]]
    assert whole.config.train_on_prompt
    assert not prepared(tiny, PAIRS).config.train_on_prompt
    assert prepared(tiny, TALKS).config.train_on_prompt


def test_answers_are_found_without_marks(tiny: ModuleType) -> None:
    with_marks = prepared(tiny, TALKS, sft(assistant_only_loss=True), template=marked(tiny))
    without = prepared(tiny, TALKS, sft(assistant_only_loss=True))
    assert pairs_of(with_marks.dataset.samples) == pairs_of(without.dataset.samples)


def test_our_own_arguments_train_answers_as_our_commands_do(tiny: ModuleType) -> None:
    samples = prepared(tiny, TALKS, {"lr": 1e-3}).dataset.samples
    want = prepared(tiny, TALKS, sft(assistant_only_loss=True)).dataset.samples
    assert pairs_of(samples) == pairs_of(want)
    asked = [{"question": "why?", "answer": "so"}]
    assert len(prepared(tiny, asked, {"lr": 1e-3}).dataset.samples) == 1
    assert len(prepared(tiny, asked).dataset.samples) == 1  # a shape that TRL does not know


def test_any_holder_of_rows_gives_the_same_samples(tiny: ModuleType, tmp_path: Path) -> None:
    class Held(TorchDataset[dict[str, Any]]):
        def __len__(self) -> int:
            return len(LABELLED)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: torch.tensor(value) for name, value in LABELLED[index].items()}

    class Stream(TorchStream[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return ({k: np.array(v) for k, v in row.items()} for row in LABELLED)

    held = datasets.Dataset.from_list(LABELLED)
    file = tmp_path / "rows.jsonl"
    held.to_json(file)
    want = prepared(tiny, LABELLED).dataset
    for rows in (held, held.with_format("torch"), held.with_format("numpy"), Held(), str(file)):
        found = prepared(tiny, rows).dataset
        assert pairs_of(found.samples) == pairs_of(want.samples)
        assert data_digest(found) == data_digest(want)
    for stream in (Stream(), held.to_iterable_dataset()):
        found = prepared(tiny, stream, sft(max_steps=9)).dataset
        assert pairs_of(found.samples) == pairs_of(want.samples)


def test_a_stream_is_read_as_far_as_needed_and_in_its_order(tiny: ModuleType) -> None:
    read = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal read
        while True:
            read += 1
            yield {"text": f"row {read}"}

    args = sft(max_steps=3, per_device_train_batch_size=2)
    data = prepared(tiny, datasets.IterableDataset.from_generator(rows), args)
    assert read < 300
    assert len(data.dataset.samples) >= 6
    assert data.config.train_sampling_strategy == "sequential"
    assert [row for step in (1, 2) for (row,) in data.order.rows(step)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="max_steps"):
        prepared(tiny, datasets.IterableDataset.from_generator(rows), sft())


def test_nothing_is_cut_without_max_length(tiny: ModuleType) -> None:
    long = [{"text": "word " * 500}, {"text": "word"}]
    data = prepared(tiny, long, sft(max_length=None))
    longest = int(data.dataset.samples.lengths.max())
    assert longest > 2048
    assert data.config.max_length == longest
    assert int(prepared(tiny, long).dataset.samples.lengths.max()) == 1024


def test_tokens_are_cut_where_sft_says_and_kept_where_a_trainer_does(tiny: ModuleType) -> None:
    from transformers import TrainingArguments

    long = [{"input_ids": [5] * 2000}]
    assert prepared(tiny, long, sft()).dataset.samples.lengths.tolist() == [1024]
    kept = prepared(tiny, long, TrainingArguments("out"))
    assert kept.dataset.samples.lengths.tolist() == [2000]
    assert kept.config.max_length == 2000
    skipped = prepared(tiny, long, sft(dataset_kwargs={"skip_prepare_dataset": True}))
    assert skipped.dataset.samples.lengths.tolist() == [2000]


def test_a_function_makes_the_text(tiny: ModuleType) -> None:
    rows = [{"q": "one", "a": "two"}]
    made = prepared(tiny, rows, formatting_func=lambda row: f"{row['q']} {row['a']}")
    want = prepared(tiny, [{"text": "one two"}])
    assert pairs_of(made.dataset.samples) == pairs_of(want.dataset.samples)
    two = prepared(tiny, rows, formatting_func=lambda row: [row["q"], row["a"]])
    assert len(two.dataset.samples) == 2
    with pytest.raises(ConfigError, match="returned no text"):
        prepared(tiny, rows, formatting_func=lambda row: row)
    with pytest.raises(ConfigError, match="completion_only_loss"):
        prepared(tiny, rows, sft(completion_only_loss=True), formatting_func=lambda row: "text")


def test_text_may_stand_in_a_column_of_another_name(tiny: ModuleType) -> None:
    rows = [{"story": "once", "messages": []}]
    made = prepared(tiny, rows, sft(dataset_text_field="story"))
    assert pairs_of(made.dataset.samples) == pairs_of(
        prepared(tiny, [{"text": "once"}]).dataset.samples
    )


def test_several_datasets_are_evaluated_by_name(tiny: ModuleType) -> None:
    held = datasets.DatasetDict(
        {"a": datasets.Dataset.from_list(TEXTS[:2]), "b": datasets.Dataset.from_list(TEXTS[2:])}
    )
    data = prepared(tiny, TEXTS, None, held)
    assert {name: len(samples) for name, samples in data.evals.items()} == {"a": 2, "b": 3}
    assert len(data.dataset.eval_samples) == 5
    assert list(prepared(tiny, TEXTS, None, TEXTS).evals) == [""]


def test_what_holds_no_rows_is_refused_with_a_way_out(tiny: ModuleType) -> None:
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list(TEXTS)})
    with pytest.raises(ConfigError, match=r"dataset\['train'\]"):
        prepared(tiny, split)
    with pytest.raises(ConfigError, match="from_dict"):
        prepared(tiny, {"text": ["a"]})
    with pytest.raises(ConfigError, match="row 1 is a str"):
        prepared(tiny, ["a"])
    with pytest.raises(ConfigError, match="train_dataset is a int"):
        prepared(tiny, 3)
    with pytest.raises(DataError, match="no rows"):
        prepared(tiny, [])
    with pytest.raises(DataError, match="no known shape"):
        prepared(tiny, [{"a": 1}])
    with pytest.raises(DataError, match="images"):
        prepared(tiny, [{"messages": [], "images": []}])


def test_a_row_that_cannot_be_used_is_named(tiny: ModuleType) -> None:
    with pytest.raises(DataError, match="train_dataset: row 2: text is not a string"):
        prepared(tiny, [{"text": "a"}, {"text": 1}])
    with pytest.raises(DataError, match=r"eval_dataset\['one'\]: row 1"):
        prepared(tiny, TEXTS, None, {"one": [{"text": None}]})
    with pytest.raises(DataError, match="no row of train_dataset"):
        prepared(tiny, [{"input_ids": [5, 6], "labels": [-100, -100]}])
    kept = prepared(tiny, [{"text": "a"}, {"text": 1}], {"on_bad_line": "skip"})
    assert kept.dataset.account.num_skipped == 1


def test_a_transform_is_not_baked_in(tiny: ModuleType) -> None:
    held = datasets.Dataset.from_list(TEXTS).with_transform(lambda rows: rows)
    with pytest.raises(ConfigError, match="with_transform"):
        prepared(tiny, held)


def test_rows_that_were_packed_stay_packed_and_apart(tiny: ModuleType) -> None:
    by_position = [
        {"input_ids": [5, 6, 7, 8, 9], "position_ids": [0, 1, 2, 0, 1]},
        {"input_ids": [9, 8, 7], "position_ids": [0, 1, 2]},
    ]
    by_length = [
        {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]},
        {"input_ids": [9, 8, 7], "seq_lengths": [3]},
    ]
    for rows in (by_position, by_length):
        data = prepared(tiny, rows)
        assert [ids for ids, _ in pairs_of(data.dataset.samples)] == [[5, 6, 7], [8, 9], [9, 8, 7]]
        assert sorted(data.order.rows(1)) == [(0, 1), (2,)]
        assert data.config.packing
    plain = prepared(tiny, [{"input_ids": [5, 6, 7], "position_ids": [0, 1, 2]}])
    assert not plain.config.packing


def test_overflow_is_cut_split_or_wrapped_as_the_strategy_says(tiny: ModuleType) -> None:
    rows = [{"input_ids": list(range(5, 25))}, {"input_ids": list(range(30, 36))}]
    common = {"packing": True, "max_length": 8}
    cut = prepared(tiny, rows, sft(**common))
    assert cut.dataset.samples.lengths.tolist() == [8, 6]
    split = prepared(tiny, rows, sft(**common, packing_strategy="bfd_split"))
    assert split.dataset.samples.lengths.tolist() == [8, 8, 4, 6]
    wrapped = prepared(tiny, rows, sft(**common, packing_strategy="wrapped"))
    tokens = [token for ids, _ in pairs_of(wrapped.dataset.samples) for token in ids]
    assert tokens == [*range(5, 25), *range(30, 36)]
    assert wrapped.dataset.samples.lengths.tolist() == [8, 8, 8, 2]
    assert not wrapped.config.packing
    trained = [label for _, labels in pairs_of(wrapped.dataset.samples) for label in labels]
    assert trained.index(30) == 20  # a sample's first token is predicted by what it stands behind
    assert [i for i, label in enumerate(trained) if label == -100] == [0, 8, 16, 24]


def test_the_short_last_batch_of_an_epoch_is_dropped_where_the_arguments_say_so(
    tiny: ModuleType,
) -> None:
    rows = [{"input_ids": list(range(5, 9 + i))} for i in range(7)]
    common = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    for drops, steps, seen in ((False, 2, 7), (True, 1, 6)):
        order = prepared(tiny, rows, sft(**common, dataloader_drop_last=drops)).order
        assert (order.steps_per_epoch, order.num_rows) == (steps, seen)


def test_without_data_to_train_on_a_way_out_is_named(tiny: ModuleType) -> None:
    with pytest.raises(ConfigError, match="train_dataset is not given"):
        prepared(tiny, None, sft())


def test_the_digest_changes_with_the_rows(tiny: ModuleType) -> None:
    one = data_digest(prepared(tiny, TEXTS).dataset)
    assert one == data_digest(prepared(tiny, list(TEXTS)).dataset)
    assert one != data_digest(prepared(tiny, TEXTS[::-1]).dataset)


def test_a_part_is_held_out_where_our_arguments_say_so(tiny: ModuleType) -> None:
    data = prepared(tiny, TEXTS, {"val_size": 2})
    assert (len(data.dataset.samples), len(data.evals[""])) == (3, 2)


def test_a_dataset_that_the_arguments_name_is_read_as_by_the_command(
    tiny: ModuleType, tiny_data: Path
) -> None:
    told = read_arguments({"dataset": str(tiny_data)}, "some/model", environment={})
    data = Preparing(told, tiny.tiny_tokenizer()).data(None)
    assert len(data.dataset.samples) == 12


def test_a_new_dataset_can_be_evaluated(tiny: ModuleType) -> None:
    told = read_arguments(None, "some/model", train_dataset=TEXTS, environment={})
    preparing = Preparing(told, tiny.tiny_tokenizer())
    assert {name: len(each) for name, each in preparing.evaluation(TALKS).items()} == {"": 5}
    assert list(preparing.evaluation({"x": TALKS, "y": TEXTS})) == ["x", "y"]


def test_features_of_a_sample_are_lists(tiny: ModuleType) -> None:
    sample = prepared(tiny, TEXTS).dataset.samples[0]
    features = features_of(sample)
    assert features["input_ids"] == sample.input_ids.tolist()
    assert features["labels"][0] == IGNORED
