"""Datasets in all the ways in which other trainers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import TrainConfig, make_config
from roundpipe.finetune.settings.entry import DatasetEntry

DATA = Path(__file__).parent / "configs"


@pytest.fixture(autouse=True)
def _somewhere_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(**given: Any) -> TrainConfig:
    return make_config({"model": "m", **given})[0]


def entries(**given: Any) -> list[dict[str, Any]]:
    """What of each entry is not as usual."""
    plain = DatasetEntry(path="-")
    return [
        {name: value for name, value in each if value != getattr(plain, name)}
        for each in made(**given).dataset
    ]


@pytest.mark.parametrize(
    ("entry", "ours"),
    [
        ({"type": "alpaca", "ds_type": "json"}, {"type": "instruction/output"}),
        ({"type": "alpaca", "field_output": "reply"}, {"columns": {"output": "reply"}}),
        ({"type": "completion", "field": "story"}, {"type": "text", "columns": {"text": "story"}}),
        ({"type": "sharegpt", "conversation": "chatml"}, {"type": "conversations"}),
        ({"type": "chat_template"}, {"type": None}),
        ({"type": "chat_template.default", "field_messages": "messages"}, {"columns": None}),
        (
            {"type": "sharegpt.load_role", "field_messages": "c"},
            {"columns": {"conversations": "c"}},
        ),
        (
            {"type": "chat_template", "field_messages": "turns", "field_tools": "tools"},
            {"columns": {"messages": "turns", "tools": "tools"}},
        ),
        (
            {
                "type": "chat_template",
                "message_field_role": "from",
                "message_field_content": "value",
            },
            {"type": "conversations", "columns": None},
        ),
        (
            {"message_property_mappings": {"role": "role", "content": "content"}},
            {"type": None, "columns": None},
        ),
        (
            {"message_property_mappings": {"role": "who", "content": "what"}},
            {
                "type": "messages",
                "columns": {"role": "who", "content": "what", "messages": "messages"},
            },
        ),
        ({"roles": {"user": ["human", "user"], "assistant": ["gpt"]}}, {"roles": None}),
        ({"roles": {"user": ["asker"]}}, {"roles": {"user": ("asker",)}}),
        ({"roles_to_train": ["assistant"], "train_on_eos": "turn", "shards": None}, {}),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "{instruction}"}},
            {"type": "instruction/output", "columns": {"instruction": "q", "output": "a"}},
        ),
        ({"columns": ["prompt", "completion"], "data_dir": None}, {"columns": None}),
        ({"subset": "de", "num_samples": 5}, {"name": "de", "max_samples": 5}),
    ],
)
def test_an_entry_with_keys_of_another_trainer(entry: Any, ours: dict[str, Any]) -> None:
    found = made(datasets=[{"path": "d.jsonl", **entry}]).dataset[0]
    assert {name: getattr(found, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shards": 10}, "not supported: shards: 10 of a dataset\nhint: max_samples=N"),
        ({"roles_to_train": ["user"]}, "not supported: roles_to_train: \\[user\\]"),
        ({"train_on_eos": "all"}, "not supported: train_on_eos: all"),
        ({"type": {"format": "Q: {instruction}"}}, "not supported: type: format"),
        ({"field_chosen": "c"}, "not supported: field_chosen: c"),
        ({"type": "nonsense"}, "nonsense is not"),
        ({"fath": "x"}, "unknown key: dataset.0.fath"),
        ({"roles": "user"}, "not roles: user"),
    ],
)
def test_what_an_entry_asks_in_vain_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        made(datasets=[{"path": "d.jsonl", **entry}])
    assert "\nhint: " in str(told.value)


def test_files_for_a_path_that_only_names_their_format() -> None:
    given = {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train"}
    assert entries(datasets=[given]) == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    assert entries(datasets=[{"path": "json", "data_files": "a.jsonl"}]) == [{"path": "a.jsonl"}]


def test_several_files_in_one_string() -> None:
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).touch()
    assert entries(dataset="a.jsonl, b.jsonl") == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    Path("c,d.jsonl").touch()
    assert entries(dataset="c,d.jsonl") == [{"path": "c,d.jsonl"}]


def test_one_dataset_of_the_hub_with_keys_beside_it() -> None:
    given = {"dataset_name": "a/b", "dataset_config": "main", "dataset_train_split": "train_sft"}
    assert entries(**given) == [{"path": "a/b", "name": "main", "split": "train_sft"}]
    config = made(**given, dataset_test_split="test_sft", eval_strategy="epoch")
    assert config.eval_dataset == (DatasetEntry(path="a/b", name="main", split="test_sft"),)
    assert made(**given, dataset_test_split="test_sft").eval_dataset is None
    with pytest.raises(ConfigError, match="dataset is given twice"):
        made(dataset_name="a/b", dataset="c/d")


def test_what_holds_for_every_entry() -> None:
    both: Any = ["a.jsonl", {"path": "b.jsonl", "max_samples": 3, "type": "openai"}]
    assert entries(dataset=both, max_samples=9) == [
        {"path": "a.jsonl", "max_samples": 9},
        {"path": "b.jsonl", "max_samples": 3, "type": "messages"},
    ]
    assert entries(dataset="a.jsonl", dataset_text_field="body") == [
        {"path": "a.jsonl", "type": "text", "columns": {"text": "body"}}
    ]
    assert entries(dataset="a.jsonl", dataset_text_field="text") == [{"path": "a.jsonl"}]
    assert entries(dataset="a.jsonl", format_type="alpaca")[0]["type"] == "instruction/output"


def test_running_text_is_packed_unless_it_is_not_to_be() -> None:
    config = made(stage="pt", dataset="a.txt")
    assert (config.packing, config.dataset[0].type) == (True, "text")
    assert not made(stage="pt", dataset="a.txt", packing=False).packing
    given = [{"path": "a/b", "text_column": "body", "type": "pretrain"}]
    config = made(pretraining_dataset=given, max_steps=5)
    assert (config.packing, config.dataset[0].columns) == (True, {"text": "body"})


# dataset_info.json


@pytest.fixture
def with_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA)


@pytest.mark.usefixtures("with_info")
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("identity", {"path": "data/identity.json", "type": "instruction/output"}),
        (
            "odd",
            {
                "path": "someone/odd",
                "name": "de",
                "split": "validation",
                "type": "conversations",
                "columns": {
                    "conversations": "dialog",
                    "role": "speaker",
                    "content": "text",
                    "tools": "tools",
                },
                "roles": {"user": ("asker",), "assistant": ("bot",)},
            },
        ),
        ("openai", {"path": "data/openai.jsonl", "type": "messages"}),
        (
            "renamed",
            {
                "path": "data/r.csv",
                "type": "instruction/output",
                "columns": {"instruction": "q", "output": "a"},
            },
        ),
    ],
)
def test_a_name_of_a_dataset_info(name: str, ours: dict[str, Any]) -> None:
    assert entries(dataset=name, dataset_dir="data") == [ours]
    assert entries(dataset=name) == [ours]  # it lies where it usually does


@pytest.mark.usefixtures("with_info")
def test_names_files_and_held_out_data_together() -> None:
    config = made(dataset="identity,renamed", eval_dataset="openai", dataset_dir="data")
    assert [each.path for each in config.dataset] == ["data/identity.json", "data/r.csv"]
    assert config.eval_dataset is not None
    assert config.eval_dataset[0].path == "data/openai.jsonl"
    assert entries(dataset="elsewhere/hub", dataset_dir="data") == [{"path": "elsewhere/hub"}]


@pytest.mark.usefixtures("with_info")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "identiti"}, "no such dataset in .*: identiti\nhint: dataset=identity"),
        ({"dataset": "pairs"}, "not supported: dataset pairs: chosen, rejected"),
        ({"dataset": "elsewhere"}, "not supported: dataset elsewhere: ms_hub_url"),
        (
            {"dataset": "a", "dataset_dir": "nowhere"},
            "no dataset_info.json in dataset_dir: nowhere",
        ),
    ],
)
def test_a_name_that_cannot_be_read_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**{"dataset_dir": "data", **given})


def test_a_name_without_a_dataset_info_is_refused_where_it_would_need_one() -> None:
    with pytest.raises(ConfigError, match="dataset: alpaca_en_demo is neither a file nor a hub id"):
        made(dataset="alpaca_en_demo", template="qwen")
    assert entries(dataset="alpaca_en_demo") == [{"path": "alpaca_en_demo"}]  # a hub id of old
    assert entries(dataset="d.jsonl", template="qwen") == [{"path": "d.jsonl"}]


def test_a_broken_dataset_info_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read: .*dataset_info\.json"):
        made(dataset="a", dataset_dir=str(tmp_path))
    (tmp_path / "dataset_info.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="not a list of datasets by name"):
        made(dataset="a", dataset_dir=str(tmp_path))
