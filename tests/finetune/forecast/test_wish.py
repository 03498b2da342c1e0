"""What `roundpipe plan` reads: training's keys, and what training does not know yet."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.wish import Wish, read_wish, trains_today


def wish(file: dict[str, Any] | None = None, **keys: Any) -> Wish:
    return read_wish(file or {}, {"model": "m", **keys}, lambda devices: 4)


def test_a_plan_needs_neither_model_nor_data() -> None:
    asked = read_wish({}, {"batch_size": 4}, lambda devices: 1)
    assert (asked.has_model, asked.has_dataset) == (False, False)
    assert asked.config.batch_size == 4
    with_both = wish(dataset="d.jsonl")
    assert (with_both.has_model, with_both.has_dataset) == (True, True)


def test_a_batch_per_device_counts_the_planned_devices() -> None:
    asked = wish(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert asked.config.batch_size == 32
    assert asked.notes == ("batch_size: 32 (2 × 4 × 4 devices)",)


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({}, "lora"),
        ({"method": "full"}, "full"),
        ({"finetuning_type": "qlora"}, "qlora"),
        ({"adapter": "qlora", "load_in_4bit": True}, "qlora"),
        ({"finetuning_type": "lora", "quantization_bit": 4}, "qlora"),
        ({"load_in_4bit": False}, "lora"),
        ({"method": "freeze", "unfrozen_parameters": ["norm"]}, "freeze"),
        ({"method": "freeze", "freeze_trainable_layers": 3}, "freeze"),
    ],
)
def test_methods(keys: dict[str, Any], method: str) -> None:
    asked = wish(keys)
    assert asked.method.name == method
    assert bool(asked.method.unfrozen) == (method == "freeze")


def test_words_of_other_trainers_are_planned_as_they_are_trained() -> None:
    asked = wish(
        {"optim": "adamw_bnb_8bit", "fp16": True, "sample_packing": True, "report_to": "wandb"},
        fp16_accumulation=True,
        host_memory_limit="64GB",
        schedule="round_robin",
        save_total_limit=1,
    )
    config = asked.config
    assert (config.optim_state_dtype, config.dtype, config.packing) == ("int8", "fp16", True)
    assert config.host_memory_limit == 64e9
    assert (asked.schedule, asked.kept, asked.fp16_accumulation) == ("round_robin", 1, True)


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, 2),
        ({"save_total_limit": None}, None),
        ({"save_strategy": "no"}, 0),
        ({"load_best_model_at_end": True, "val_size": 0.1}, 3),
    ],
)
def test_the_checkpoints_that_stay(keys: dict[str, Any], kept: int | None) -> None:
    assert wish(**keys).kept == kept


def test_the_command_line_silences_what_the_file_says() -> None:
    file = {"adapter": "qlora", "load_in_4bit": True, "torch_dtype": "float16"}
    asked = wish(file, method="full", dtype="bf16")
    assert (asked.method.name, asked.config.dtype) == ("full", "bf16")
    became = {each.key: each.text for each in asked.keys}
    assert became["adapter"] == became["torch_dtype"] == "the command line says it"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"modle": "x"}, "unknown key: modle"),
        ({"push_to_hub": True}, "not supported: push_to_hub"),
        ({"method": "full", "load_in_4bit": True}, "4-bit weights cannot be trained: load_in_4bit"),
        ({"method": "freeze", "freeze_trainable_layers": "x"}, "not a number of layers: freeze_"),
        ({"optim_state_dtype": "fp8"}, "optim_state_dtype: fp8 is not 'fp32', 'bf16'"),
        ({"schedule": "best"}, "schedule: best is not 'auto'"),
        ({"host_memory_limit": "lots"}, "host_memory_limit: not an amount of memory: lots"),
        ({"fp16_accumulation": 3}, "fp16_accumulation: 3 is not"),
        ({"save_total_limit": "few"}, "save_total_limit: few is not"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: cosin is not"),
        ({"batch_size": 0}, "batch_size: 0 is not"),
        ({"max_length": 1}, "max_length: 1 is not"),
    ],
)
def test_mistakes_are_said_as_training_says_them(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        wish(keys)
    assert str(told.value).startswith(message)
    assert "\nhint: " in str(told.value)


def test_a_card_that_looks_like_a_number_is_a_machine() -> None:
    assert wish(machine=4090).config.machine == "4090"


def test_adapter_settings_count_only_with_an_adapter() -> None:
    assert wish(method="full", lora_r=64).method == wish(method="full").method
    assert wish(lora_r=64, target_modules="q_proj,v_proj").method.lora.r == 64


def test_hints_are_tried_on_training() -> None:
    assert trains_today(finetuning_type="lora")
    assert not trains_today(finetuning_type="no such")
