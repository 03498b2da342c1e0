"""What a Trainer is told becomes settings: theirs with their defaults, ours as in a config."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.finetune.tiny_model import tiny_model
from transformers import BitsAndBytesConfig, TrainingArguments

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.finetune.model.adapters import lora_config
from roundpipe.finetune.model.peft_quietly import LoraConfig, get_peft_model
from roundpipe.finetune.settings.config import TrainConfig, dump_config, load_config, make_config
from roundpipe.finetune.trainer.arguments import read_arguments

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from roundpipe.finetune.trainer.told import Told

ROWS = [{"text": "a"}]


@pytest.fixture(autouse=True)
def _without_deprecations() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def read(args: Any, model: Any = "some/model", **beside: Any) -> Told:
    beside.setdefault("train_dataset", ROWS)
    return read_arguments(args, model, environment={}, **beside)


def sft(**fields: Any) -> Any:
    return pytest.importorskip("trl").SFTConfig("out", use_cpu=True, **{"bf16": False, **fields})


def test_no_arguments_are_those_of_sft_with_the_precision_of_the_device() -> None:
    told = read(None)
    config = told.config
    assert (config.learning_rate, config.lr_scheduler_type, config.warmup_steps) == (
        2e-5,
        "linear",
        0,
    )
    assert (config.num_train_epochs, config.batch_size, config.max_length) == (3, 8, 1024)
    assert (config.output_dir, config.dtype, config.finetuning_type) == (
        "model-SFT",
        "auto",
        "full",
    )
    assert isinstance(told.arguments, TrainingArguments)
    assert told.arguments.logging_steps == 10


def test_training_arguments_keep_their_own_defaults() -> None:
    config = read(TrainingArguments("out", use_cpu=True)).config
    assert (config.learning_rate, config.logging_steps, config.save_steps) == (5e-5, 500, 500)
    assert (config.save_total_limit, config.save_strategy, config.optim) == (
        None,
        "steps",
        "adamw_torch",
    )
    assert (config.seed, config.dtype, config.devices, config.report_to) == (42, "fp32", "cpu", ())


def test_sft_config_keeps_its_own_defaults() -> None:
    told = read(sft(bf16=None))
    assert (told.config.learning_rate, told.config.logging_steps) == (2e-5, 10)
    assert (told.config.dtype, told.config.max_length, told.config.packing) == ("bf16", 1024, False)
    assert told.preparation.is_theirs
    assert told.preparation.cuts_tokens


def test_what_is_set_is_set() -> None:
    told = read(
        sft(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=7,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr": 2e-6},
            warmup_steps=0.1,
            weight_decay=0.01,
            adam_beta2=0.95,
            max_grad_norm=0.0,
            neftune_noise_alpha=5.0,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="epoch",
            save_total_limit=3,
            run_name="one",
            seed=1,
            data_seed=2,
            packing=True,
            max_length=64,
            eos_token="<|im_end|>",
            chat_template_path="t.jinja",
            train_sampling_strategy="sequential",
        ),
        eval_dataset=ROWS,
    )
    config = told.config
    assert (config.batch_size, config.max_steps, config.min_lr_ratio) == (6, 7, 0.1)
    assert (config.warmup_steps, config.weight_decay, config.adam_beta2) == (0.1, 0.01, 0.95)
    assert (config.max_grad_norm, config.neftune_noise_alpha) == (None, 5.0)
    assert (config.eval_strategy, config.eval_steps, config.save_strategy) == ("steps", 2, "epoch")
    assert (config.save_total_limit, config.run_name) == (3, "one")
    assert (config.seed, config.data_seed) == (1, 2)
    assert (config.packing, config.max_length) == (True, 64)
    assert config.special_tokens == {"eos_token": "<|im_end|>"}
    assert (config.chat_template, config.train_sampling_strategy) == ("t.jinja", "sequential")


def test_a_batch_is_times_the_devices() -> None:
    args = TrainingArguments("out", per_device_train_batch_size=2)
    with RoundPipe(tiny_model(), devices="cpu*3") as pipe:
        assert read(args, pipe).config.batch_size == 6


def test_an_8_bit_optimizer_keeps_moments_in_8_bits() -> None:
    assert read(TrainingArguments("out", optim="adamw_8bit")).config.optim_state_dtype == "int8"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optim": "adafactor"}, "optim: adafactor"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: polynomial"),
        ({"push_to_hub": True}, "push_to_hub"),
        ({"optim_args": "a=1"}, "optim_args"),
        ({"greater_is_better": True, "metric_for_best_model": "loss"}, "greater_is_better"),
        ({"metric_for_best_model": "eval_accuracy"}, "metric_for_best_model"),
        ({"label_names": ["start"]}, "label_names"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read(TrainingArguments("out", **fields))
    assert "hint: " in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss_type": "dft"}, "loss_type=dft"),
        ({"truncation_mode": "keep_end"}, "truncation_mode"),
        ({"dataset_kwargs": {"add_special_tokens": False}}, "dataset_kwargs"),
        ({"packing": True, "max_length": None}, "packing"),
        ({"model_init_kwargs": {"rope_scaling": {}, "max_position_embeddings": 4}}, "rope|max_pos"),
        ({"model_init_kwargs": {"cache_dir": "x"}}, "HF_HOME"),
    ],
)
def test_what_sft_has_and_we_have_not_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(sft(**fields))


def test_a_config_of_another_trainer_of_trl_is_refused() -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(ConfigError, match="DPOConfig"):
        read(trl.DPOConfig("out", use_cpu=True, bf16=False))


def test_what_is_needless_is_named_in_one_line() -> None:
    args = TrainingArguments("out", gradient_checkpointing=True, dataloader_num_workers=2)
    (note,) = [note for note in read(args).notes if note.startswith("not needed here: ")]
    assert "gradient_checkpointing" in note
    assert "dataloader_num_workers" in note


def test_model_init_kwargs_say_how_a_name_is_loaded() -> None:
    given = {
        "revision": "v2",
        "dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
        "trust_remote_code": True,
        "device_map": "auto",
    }
    told = read(sft(model_init_kwargs=given), "some/model")
    assert told.config.model_name_or_path == "some/model@v2"
    assert (told.config.dtype, told.config.attn_implementation) == ("bf16", "sdpa")
    assert any("trust_remote_code" in note for note in told.notes)


def test_a_loaded_model_says_its_dtype_and_method(tiny: ModuleType) -> None:
    model = tiny.tiny_model().to(torch.bfloat16)
    config = read(TrainingArguments("out"), model).config
    assert (config.dtype, config.finetuning_type) == ("bf16", "full")
    assert config.model_name_or_path == "LlamaForCausalLM"
    wrapped = get_peft_model(tiny.tiny_model(), LoraConfig(task_type="CAUSAL_LM"))
    assert read(None, wrapped).config.finetuning_type == "lora"
    with pytest.raises(ConfigError, match="merge_and_unload"):
        read(None, wrapped, peft_config=LoraConfig())


def test_every_field_of_a_lora_config_is_kept() -> None:
    given = LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        lora_alpha=5,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        exclude_modules=["lm_head"],
        bias="lora_only",
        rank_pattern={"q_proj": 8},
        layers_to_transform=[0, 1],
        init_lora_weights="gaussian",
        modules_to_save=["lm_head"],
        use_rslora=True,
    )
    config = read(None, peft_config=given).config
    again = lora_config(load_config_of(config)).to_dict()
    want = given.to_dict()
    for fields in (again, want):
        for name in ("target_modules", "exclude_modules"):
            fields[name] = sorted(fields[name])
    assert again == want


def load_config_of(config: TrainConfig) -> TrainConfig:
    """The config as it is read from the file that it is saved in."""
    import yaml

    return make_config(yaml.safe_load(dump_config(config)))[0]


def test_without_target_modules_peft_chooses_for_the_architecture() -> None:
    config = read(None, peft_config=LoraConfig()).config
    assert lora_config(config).target_modules is None


def test_4_bits_are_qlora_and_need_an_adapter(tiny: ModuleType) -> None:
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    told = read(sft(), peft_config=LoraConfig(), quantization_config=four)
    assert told.config.finetuning_type == "qlora"
    inside = sft(model_init_kwargs={"quantization_config": four})
    assert read(inside, peft_config=LoraConfig()).config.finetuning_type == "qlora"
    with pytest.raises(ConfigError, match="without peft_config"):
        read(sft(), quantization_config=four)
    with pytest.raises(ConfigError, match="8bit"):
        read(
            None,
            peft_config=LoraConfig(),
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        )
    with pytest.raises(ConfigError, match="while it is loaded"):
        read(None, tiny.tiny_model(), peft_config=LoraConfig(), quantization_config=four)


def test_fp4_is_refused() -> None:
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")
    with pytest.raises(ConfigError, match="fp4"):
        read(None, peft_config=LoraConfig(), quantization_config=four)


def test_another_kind_of_adapter_is_refused_by_name() -> None:
    from peft import IA3Config, PromptTuningConfig

    for given in (IA3Config(), PromptTuningConfig(num_virtual_tokens=2)):
        with pytest.raises(ConfigError, match=str(given.peft_type.value)):
            read(None, peft_config=given)


def test_a_dict_has_our_keys_and_our_defaults() -> None:
    told = read({"lr": 1e-3, "epochs": 2, "per_device_train_batch_size": 4})
    assert (told.config.learning_rate, told.config.num_train_epochs) == (1e-3, 2)
    assert (told.config.finetuning_type, told.config.batch_size) == ("lora", 4)
    assert not told.is_theirs


def test_a_dict_may_say_the_data_or_leave_it_to_the_arguments() -> None:
    told = read({"dataset": "rows.jsonl"}, train_dataset=None)
    assert told.config.dataset[0].path == "rows.jsonl"
    with pytest.raises(ConfigError, match="dataset is given twice"):
        read({"dataset": "rows.jsonl"})
    assert read({}, train_dataset="rows.jsonl").config.dataset[0].path == "rows.jsonl"
    with pytest.raises(ConfigError, match="unknown key: learnin_rate"):
        read({"learnin_rate": 1})


def test_a_model_given_to_a_dict_is_trained_as_it_is(tiny: ModuleType) -> None:
    assert read({"lr": 1e-3}, tiny.tiny_model()).config.finetuning_type == "full"
    config = read({"lr": 1e-3}, tiny.tiny_model(), peft_config=LoraConfig(r=3)).config
    assert (config.finetuning_type, config.lora_r) == ("lora", 3)


def test_our_config_is_taken_as_it_is_and_callbacks_see_it(tmp_path: Path) -> None:
    given, _ = make_config(
        {
            "model": "some/model",
            "dataset": "rows.jsonl",
            "eval_dataset": "other.jsonl",
            "eval_steps": 5,
            "early_stopping_patience": 2,
            "load_best_model_at_end": True,
            "max_steps": 20,
            "batch_size": 4,
            "report_to": "tensorboard",
            "output_dir": str(tmp_path),
        }
    )
    told = read(given, train_dataset=None)
    changed = told.config.model_copy(
        update={"report_to": given.report_to, "resume_from_checkpoint": "auto"}
    )
    assert changed == given
    seen = told.arguments
    assert (seen.max_steps, seen.eval_strategy.value, seen.eval_steps) == (20, "steps", 5)
    assert (seen.save_strategy.value, seen.load_best_model_at_end) == ("no", True)
    assert (seen.metric_for_best_model, seen.greater_is_better) == ("eval_loss", False)
    assert (seen.report_to, seen.per_device_train_batch_size) == (["tensorboard"], 4)


def test_what_is_no_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="args is a int"):
        read(3)


def test_the_config_of_objects_loads_again(tmp_path: Path) -> None:
    config = read(sft(), eval_dataset=ROWS).config
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    again = load_config([str(file)])[0]
    assert again.model_copy(update={"resume_from_checkpoint": "none"}) == config
