"""Our own keys in the words and habits of other trainers."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.finetune.settings.config import TrainConfig, make_config, read_layers


def read(**file: Any) -> tuple[TrainConfig, list[str]]:
    reading = read_layers({"model": "m", "dataset": "d.jsonl", **file}, {}, lambda devices: 1)
    return reading.config, reading.notes


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"logging_steps": 25}, 25),
        ({"logging_steps": 0.05}, 0.05),
        ({}, 500),
        ({"eval_steps": 7, "logging_steps": 25}, 7),
    ],
)
def test_evaluation_by_steps_without_a_number_goes_by_the_log_as_in_transformers(
    keys: dict[str, Any], steps: float
) -> None:
    config, notes = read(eval_strategy="steps", val_size=0.1, **keys)
    assert config.eval_steps == steps
    assert ("nothing else is said" in str(notes)) == ("eval_steps" not in keys)


def test_saving_by_steps_without_a_number_is_every_five_hundred_as_in_transformers() -> None:
    config, notes = read(save_strategy="steps", logging_steps=10)
    assert config.save_steps == 500
    assert "save_steps: 500 (as nothing else is said)" in notes


def test_steps_without_a_number_ask_for_nothing_where_nothing_is_held_out() -> None:
    assert read(eval_strategy="steps", val_set_size=0.0)[0].eval_strategy == "no"


def test_embedding_and_head_among_the_targets_are_trained_whole_as_unsloth_does() -> None:
    targets = ["q_proj", "embed_tokens", "lm_head"]
    config = read_layers(
        {"model_name": "m", "dataset": "d", "target_modules": targets}, {}, lambda devices: 1
    ).config
    assert config.target_modules == ("q_proj",)
    assert config.modules_to_save == ("embed_tokens", "lm_head")
    assert read(lora_target_modules=targets)[0].target_modules == tuple(targets)


def test_all_linear_takes_in_what_is_named_beside_it() -> None:
    config, _ = read(lora_target_linear=True, lora_target_modules=["q_proj", "v_proj"])
    assert config.target_modules == "all-linear"


def test_special_tokens_go_on_but_for_the_padding() -> None:
    both = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": None}
    assert read(special_tokens=both)[0].special_tokens == {"eos_token": "</s>"}
    assert read(special_tokens={"pad_token": "<pad>"})[0].special_tokens is None
    config, _ = read(eos_token="<|im_end|>", tokens=["<a>"])
    assert config.special_tokens == {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ("<a>",),
    }


def test_noise_of_nothing_is_none() -> None:
    assert (
        make_config({"model": "m", "dataset": "d", "neftune_noise_alpha": 0})[0]
        == (make_config({"model": "m", "dataset": "d"})[0])
    )
