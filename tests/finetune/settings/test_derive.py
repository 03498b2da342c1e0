"""Foreign keys whose meaning hangs on their value, and those that belong together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import (
    TrainConfig,
    dump_config,
    load_config,
    make_config,
    read_layers,
)


def made(**given: Any) -> TrainConfig:
    return make_config({"model": "m", "dataset": "d.jsonl", **given})[0]


def from_file(**file: Any) -> TrainConfig:
    return read_layers({"dataset": "d.jsonl", **file}, {}, lambda devices: 1).config


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"evals_per_epoch": 2, "val_size": 0.1}, {"eval_steps": 1 / 6, "eval_strategy": "steps"}),
        ({"evals_per_epoch": 1, "val_size": 0.1}, {"eval_steps": None, "eval_strategy": "epoch"}),
        ({"evals_per_epoch": 2}, {"eval_strategy": "no"}),
        ({"saves_per_epoch": 4, "num_epochs": 2}, {"save_steps": 0.125, "save_strategy": "steps"}),
        ({"saves_per_epoch": 2, "num_epochs": 0.5}, {"save_strategy": "epoch"}),
        ({"save_strategy": "epoch", "save_steps": 500}, {"save_steps": None}),
        ({"eval_steps": 5, "eval_strategy": "epoch", "val_size": 9}, {"eval_steps": None}),
        ({"val_set_size": 0, "eval_steps": 50}, {"eval_strategy": "no", "eval_steps": None}),
        ({"evals_per_epoch": 4, "max_steps": 20, "val_size": 9}, {"eval_steps": 1 / 12}),
        (
            {"evals_per_epoch": 2, "eval_strategy": "steps", "val_size": 9},
            {"eval_steps": 1 / 6, "eval_strategy": "steps"},
        ),
        (
            {"saves_per_epoch": 1, "save_strategy": "steps"},
            {"save_strategy": "epoch", "save_steps": None},
        ),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.0, "warmup_steps": 7}, {"warmup_steps": 7}),
        ({"lr": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}}, {"min_lr_ratio": 0.1}),
        ({"lr_scheduler_kwargs": '{"min_lr_rate": 0.2}'}, {"min_lr_ratio": 0.2}),
        ({"pissa_init": True, "pissa_iter": 4}, {"peft": {"init_lora_weights": "pissa"}}),
        ({"pissa_init": True, "pissa_iter": -1}, {"peft": {"init_lora_weights": "pissa"}}),
        ({"bias": "none", "loftq_config": None}, {"peft": None}),
        (
            {"bias": "all", "peft": {"rank_pattern": {}}},
            {"peft": {"rank_pattern": {}, "bias": "all"}},
        ),
        ({"unfrozen_parameters": ["norm"]}, {"finetuning_type": "freeze"}),
        ({"method": "freeze"}, {"unfrozen_parameters": ("layers:-2",)}),
        (
            {"method": "freeze", "freeze_trainable_layers": -3},
            {"unfrozen_parameters": ("layers:3",)},
        ),
        (
            {"method": "freeze", "freeze_trainable_layers": 1, "freeze_extra_modules": "lm_head"},
            {"unfrozen_parameters": ("layers:-1", r"(^|\.)lm_head(\.|$)")},
        ),
        ({"freeze_trainable_layers": 2}, {"unfrozen_parameters": None, "finetuning_type": "lora"}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"curriculum_sampling": True}, {"train_sampling_strategy": "sequential"}),
        ({"neat_packing": True, "packing": False}, {"packing": True}),
        ({"random_state": 1, "seed": 2}, {"seed": 2}),
        ({"random_state": 1}, {"seed": 1}),
        ({"bf16": "auto"}, {"dtype": "auto"}),
        ({"bf16": "full"}, {"dtype": "bf16"}),
        ({"dtype": "torch.bfloat16", "bf16": True}, {"dtype": "bf16"}),
        ({"float32": True}, {"dtype": "fp32"}),
        ({"eager_attention": True}, {"attn_implementation": "eager"}),
        ({"flash_attn": "disabled"}, {"attn_implementation": "eager"}),
        ({"flash_attn": "auto"}, {"attn_implementation": "sdpa"}),
        ({"attn_implementation": "kernels-community/flash-attn"}, {"attn_implementation": "sdpa"}),
        ({"use_cpu": True}, {"devices": "cpu"}),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16", "use_cache": False}}, {"dtype": "bf16"}),
        ({"quantization_config": {"load_in_4bit": True}}, {"finetuning_type": "qlora"}),
        ({"chat_template": "qwen-2.5"}, {"chat_template": "auto"}),
        (
            {"chat_template": "jinja", "chat_template_jinja": "a.jinja"},
            {"chat_template": "a.jinja"},
        ),
        ({"metric_for_best_model": "loss", "val_size": 1}, {"metric_for_best_model": "eval_loss"}),
        ({"logging_steps": 0.05}, {"logging_steps": 1}),
        ({"save_total_limit": -1}, {"save_total_limit": None}),
        ({"max_steps": 0}, {"max_steps": None}),
        ({"learning_rate": "2e-4", "batch_size": "8"}, {"learning_rate": 2e-4, "batch_size": 8}),
        ({"auto_resume_from_checkpoints": True}, {"resume_from_checkpoint": "auto"}),
        ({"tokenizer_config": "m"}, {}),
        ({"label_smoothing_factor": 0, "loss_type": "nll", "hub_model_id": None}, {}),
        ({"use_wandb": False, "wandb_project": "x"}, {"report_to": ()}),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, {}),
    ],
)
def test_habits_become_fields(keys: dict[str, Any], fields: dict[str, Any]) -> None:
    config = made(**keys)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, "warmup_steps is given twice: warmup_steps: 7"),
        ({"saves_per_epoch": -1}, "not a number: saves_per_epoch: -1"),
        ({"tokenizer_config": "other"}, "not supported: tokenizer_config: other"),
        ({"bias": "all", "peft": {"bias": "none"}}, "bias is given twice"),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "not supported: dataset_kwargs"),
        ({"model_init_kwargs": {"xyzzy": 1}}, "unknown key: xyzzy"),
        ({"training": {"seed": 1}, "seed": 2}, "seed is given twice: 1 and 2"),
        ({"format_type": "nonsense"}, "format_type: nonsense is none of"),
        ({"format_type": ["alpaca"]}, "format_type: ['alpaca'] is none of"),
        ({"plugins": 3}, "not supported: plugins: 3"),
        ({"pretraining_dataset": [3], "dataset": None}, "not a dataset: pretraining_dataset: 3"),
        ({"report_to": 3}, "report_to.0: 3 is not"),
        ({"warmup_steps": 2.5}, "warmup_steps: neither a share below 1 nor a whole number: 2.5"),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
            "not supported: lr_scheduler_type: cosine_with_restarts",
        ),
    ],
)
def test_what_disagrees_or_cannot_be_is_an_error(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        made(**keys)
    assert str(told.value).startswith(message)
    assert "\nhint: " in str(told.value)


def test_a_file_that_names_no_method_means_what_it_means_where_it_comes_from() -> None:
    axolotl = {"base_model": "m", "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    assert from_file(**axolotl).finetuning_type == "full"
    assert from_file(**axolotl, lora_r=8).finetuning_type == "lora"
    assert from_file(**axolotl, adapter="lora").finetuning_type == "lora"
    assert from_file(**axolotl, adapter=None, lora_r=8).finetuning_type == "full"
    trl = {"model_name_or_path": "m", "dataset_name": "a/b", "dataset": None}
    assert from_file(**trl).finetuning_type == "full"
    assert from_file(**trl, use_peft=True).finetuning_type == "lora"
    mixture = {"model_name_or_path": "m", "dataset": None, "datasets": [{"path": "a/b"}]}
    assert from_file(**mixture, test_split_size=0.1).finetuning_type == "full"
    assert from_file(model_name_or_path="m", use_peft=False).finetuning_type == "full"
    assert from_file(model_name_or_path="m", template="qwen").finetuning_type == "lora"
    assert made(base_model=None, lr=1e-4).finetuning_type == "lora"
    reading = read_layers({"dataset": "d", **axolotl}, {"method": "lora"}, lambda devices: 1)
    assert reading.config.finetuning_type == "lora"
    assert "finetuning_type: full" not in str(reading.notes)


def test_null_in_a_file_says_nothing_of_resuming_and_none_does() -> None:
    assert from_file(model="m", resume_from_checkpoint=None).resume_from_checkpoint == "auto"
    assert made(resume_from_checkpoint=None).resume_from_checkpoint == "none"
    assert made(resume_from_checkpoint=False).resume_from_checkpoint == "none"
    assert made(resume_from_checkpoint=True).resume_from_checkpoint == "auto"


def test_none_as_a_word_in_a_file_starts_over(tmp_path: Any) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: m\ndataset: d\nresume_from_checkpoint: none\n")
    assert load_config([str(path)])[0].resume_from_checkpoint == "none"
    path.write_text("model: m\ndataset: d\nresume_from_checkpoint:\n")
    assert load_config([str(path)])[0].resume_from_checkpoint == "auto"


def test_all_loggers_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe.finetune.settings import reporters

    monkeypatch.setattr(reporters, "installed_loggers", lambda: ["wandb", "trackio"])
    assert made(report_to="all").report_to == ("wandb", "trackio")
    assert made(report_to=["all", "mlflow"]).report_to == ("wandb", "trackio", "mlflow")


# a config that was saved loads again


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "finetuning_type": st.sampled_from(["lora", "full", "qlora"]),
            "learning_rate": st.floats(0, 1, allow_nan=False),
            "batch_size": st.integers(1, 10**6),
            "max_grad_norm": st.none() | st.floats(0.001, 10),
            "val_size": st.sampled_from([0.1, 0.5, 3]),
            "save_steps": st.sampled_from([0.25, 10]),
            "save_total_limit": st.none() | st.integers(1, 9),
            "warmup_steps": st.floats(0, 0.99) | st.integers(0, 100),
            "report_to": st.lists(st.sampled_from(["wandb", "mlflow"]), unique=True),
            "run_name": st.text(min_size=1, max_size=8).filter(str.strip),
            "sample_prompts": st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=2),
            "target_modules": st.just("all-linear")
            | st.lists(st.text("ab_", min_size=1), min_size=1),
            "devices": st.sampled_from(["auto", 2, "cpu*2", ["cuda:0", "cpu"]]),
            "host_memory_limit": st.floats(0.01, 1) | st.integers(2, 10**12),
            "overwrite_output_dir": st.booleans(),
            "resume_from_checkpoint": st.sampled_from(["auto", "none"]),
            "packing": st.booleans(),
            "seed": st.integers(0, 2**63 - 1),
            "dataset": st.lists(
                st.fixed_dictionaries(
                    {
                        "path": st.text(
                            st.characters(codec="utf-8", exclude_characters=","),
                            min_size=1,
                            max_size=8,
                        )
                    },
                    optional={
                        "weight": st.floats(0.1, 3),
                        "split": st.sampled_from(["train", "test[:5]"]),
                        "columns": st.dictionaries(st.text("qa", min_size=1), st.text("x")),
                        "max_samples": st.integers(1, 99),
                    },
                ),
                min_size=1,
                max_size=3,
            ),
        },
    )
)
def test_whatever_is_saved_loads_to_an_equal_config(values: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({"model_name_or_path": "m", "dataset": "d", **values})
    saved = yaml.safe_load(dump_config(config))
    again = read_layers(saved, {}, lambda devices: 1)
    start = {"resume_from_checkpoint": "auto", "overwrite_output_dir": False}
    assert again.config == config.model_copy(update=start)
    assert [note for note in again.notes if "not used with" not in note] == []
