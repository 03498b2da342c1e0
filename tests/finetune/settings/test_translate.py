"""From the keys people bring to fields: what was quoted, refused, or stands in every old file."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.config import read_layers
from roundpipe.finetune.settings.parse import parse_argv
from roundpipe.finetune.settings.translate import KNOWN

BASE = {"model_name_or_path": "m", "dataset": "d.jsonl"}


def read(file: dict[str, Any], *words: str) -> Any:
    _, command_line = parse_argv(words, known=KNOWN)
    return read_layers({**BASE, **file}, command_line, lambda devices: 1)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"load_in_4bit": "false"}, "finetuning_type", "lora"),
        ({"load_in_4bit": "True"}, "finetuning_type", "qlora"),
        ({"sample_packing": "no"}, "packing", False),
        ({"max_steps": "-1"}, "max_steps", None),
        ({"save_steps": "0"}, "save_strategy", "minutes"),
        ({"lora_target": "['q_proj', 'v_proj']"}, "target_modules", ("q_proj", "v_proj")),
        ({"report_to": "['tensorboard']"}, "report_to", ("tensorboard",)),
        ({"max_grad_norm": "none"}, "max_grad_norm", None),
        ({"run_name": "2024"}, "run_name", "2024"),
        ({"model_revision": "12345"}, "model_name_or_path", "m@12345"),
        ({"target_modules": "[qv]_proj"}, "target_modules", "[qv]_proj"),
    ],
)
def test_quotes_make_no_other_value_of_a_truth_or_a_number(
    keys: dict[str, Any], field: str, value: Any
) -> None:
    assert getattr(read(keys).config, field) == value


def test_what_a_refusal_says_can_be_pasted() -> None:
    for key in keys.REFUSED:
        with pytest.raises(ConfigError) as found:
            read({key: "xyzzy"})
        assert f"{key}=none" in str(found.value)
        read({key: "xyzzy"}, f"{key}=none")


def test_all_that_is_refused_is_told_at_once() -> None:
    hub = {"push_to_hub": True, "hub_model_id": "me/x", "hub_strategy": "end", "beta": 0.1}
    with pytest.raises(ConfigError) as found:
        read(hub)
    first, _, hint = str(found.value).partition("\nhint: ")
    assert first == "not supported: push_to_hub: true, hub_model_id: me/x, beta: 0.1"
    assert hint.startswith("push_to_hub=none hub_model_id=none, and upload")
    read(hub, *(word.strip(",:;") for word in hint.split() if "=none" in word))


def test_a_token_of_the_hub_is_shown_nowhere() -> None:
    reading = read({"token": "hf_x1", "hf_hub_token": "hf_x2", "eos_token": "<|im_end|>"})
    shown = f"{reading.keys} {reading.notes}"
    assert "hf_x" not in shown
    assert "<|im_end|>" in shown
    for key in keys.REFUSED.keys() & {"hub_token", "push_to_hub_token"}:
        with pytest.raises(ConfigError, match=f"not supported: {key}: …") as found:
            read({key: "hf_x"})
        assert "hf_x" not in str(found.value)


def test_experts_of_axolotls_qlora_are_packed_as_it_asks() -> None:
    asked = {"adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True}
    assert read(asked).config.finetuning_type == "qlora"


def test_a_config_that_merges_an_adapter_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"no dataset is given, and export_dir: out is not train"):
        read_layers({"model": "m", "export_dir": "out"}, {}, lambda devices: 1)


def test_overwriting_in_a_file_is_no_word_against_going_on() -> None:
    standing = read({"overwrite_output_dir": True})
    assert "resume_from_checkpoint" in standing.config.model_fields_set
    assert "an unfinished run of the same config goes on" in str(standing.notes)
    for words in (("overwrite_output_dir=true",), ("resume_from_checkpoint=none",)):
        said = read({"overwrite_output_dir": True}, *words).config
        assert said.resume_from_checkpoint == ("none" if "none" in words[0] else "auto")
        assert ("resume_from_checkpoint" in said.model_fields_set) == ("none" in words[0])


def test_a_mixture_may_stand_in_a_section() -> None:
    mixture = {"datasets": [{"path": "a.jsonl"}], "test_split_size": 0.1}
    config = read_layers(
        {"model_name_or_path": "m", "dataset_mixture": mixture}, {}, lambda devices: 1
    ).config
    assert config.dataset[0].path == "a.jsonl"
    assert config.val_size == 0.1
    assert config.finetuning_type == "full"


def test_prompts_that_axolotl_writes_itself_are_told_of() -> None:
    entries = [{"path": "a.jsonl", "type": "alpaca:chat"}, {"path": "b", "conversation": "chatml"}]
    notes = read_layers({"base_model": "m", "datasets": entries}, {}, lambda devices: 1).notes
    for what in ("the prompt of type: alpaca", "conversation: chatml"):
        assert any(note.startswith(f"not used: {what} (the model's chat") for note in notes)
    assert "not used" not in str(read({"dataset": [{"path": "a", "type": "alpaca"}]}).notes)


def test_arguments_of_a_notebook_may_stand_in_sections() -> None:
    config = read(
        {
            "lora_config": {"r": 8, "task_type": "CAUSAL_LM", "bias": "none"},
            "bnb_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "training_args": {"per_device_train_batch_size": 3, "learning_rate": "2e-5"},
        }
    ).config
    assert (config.finetuning_type, config.lora_r) == ("qlora", 8)
    assert (config.batch_size, config.learning_rate) == (3, 2e-5)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"typ": "alpaca"}, "unknown key: dataset.0.typ\nhint: type"),
        ({"type": "input_output"}, "input_output is not .*\nhint: leave type out"),
        ({"type": "mesages"}, "mesages is not .*\nhint: type: messages"),
    ],
)
def test_a_slip_inside_an_entry_is_told_with_what_is_meant(
    entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"dataset": [{"path": "a.jsonl", **entry}]})


def test_a_logger_that_is_none_of_ours_is_told_with_one_that_is() -> None:
    with pytest.raises(ConfigError, match="hint: report_to=tensorboard"):
        read({"report_to": ["xyzzy"]})


def test_a_command_line_alone_means_what_it_means_where_it_comes_from() -> None:
    words = ("--model_name_or_path", "m", "--dataset_name", "a/b")
    for more, method in (((), "full"), (("--use_peft",), "lora"), (("--lora_r", "8"), "lora")):
        _, command_line = parse_argv((*words, *more), known=KNOWN)
        reading = read_layers({}, command_line, lambda devices: 1)
        assert reading.config.finetuning_type == method
