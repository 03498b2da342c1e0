from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import TrainConfig, dump_config, load_config, make_config

if TYPE_CHECKING:
    from pathlib import Path

BASE = ("model=m", "dataset=d.jsonl")


def load(*words: str) -> TrainConfig:
    return load_config([*BASE, *words])[0]


def notes(**given: Any) -> list[str]:
    return make_config({"model_name_or_path": "m", "dataset": "d.jsonl", **given})[1]


def error(*words: str, base: tuple[str, ...] = BASE) -> str:
    with pytest.raises(ConfigError) as found:
        load_config([*base, *words])
    return str(found.value)


# defaults


def test_defaults_hang_on_the_method() -> None:
    lora, full = load(), load("finetuning_type=full")
    assert (lora.learning_rate, full.learning_rate) == (2e-4, 1e-5)
    assert (lora.lora_r, lora.lora_alpha, load("lora_r=8").lora_alpha) == (16, 32, 16)
    assert (lora.batch_size, lora.max_length, lora.num_train_epochs) == (16, 2048, 3)
    assert (lora.warmup_steps, lora.max_grad_norm, lora.staleness) == (0.03, 1.0, 0)


def test_evaluation_is_on_where_there_is_data_for_it() -> None:
    assert load().eval_strategy == "no"
    assert load("val_size=0.1").eval_strategy == "epoch"
    assert load("val_size=0.1", "eval_steps=5").eval_strategy == "steps"
    assert load("val_size=0.1", "eval_strategy=no").eval_strategy == "no"


def test_null_means_the_default_save_where_none_is_a_setting() -> None:
    config = load("learning_rate=null", "batch_size=none", "max_grad_norm=None", "max_steps=-1")
    assert (config.learning_rate, config.batch_size) == (2e-4, 16)
    assert (config.max_grad_norm, config.max_steps) == (None, None)


def test_settings_that_are_equal_are_equal_configs() -> None:
    assert load("lr=1e-4") == load("learning_rate=0.0001")
    with pytest.raises(ValueError, match="frozen"):
        load().batch_size = 3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("500m", 5 * 10**8), ("4096", 4096)],
)
def test_memory_is_told_in_bytes(text: str, num_bytes: int) -> None:
    assert load(f"device_memory_limit={text}").device_memory_limit == num_bytes


# a config that was saved loads again


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("finetuning_type=full", "val_size=0.1", "eval_steps=3", "max_grad_norm=none"),
        ("dataset=[a.jsonl, {path: b.jsonl, columns: {question: q}, max_samples: 3}]",),
        ("target_modules=q_proj,v_proj", "sample_prompts=What: is #1?", "devices=[cuda:0, 1]"),
        ("peft={init_lora_weights: pissa}", "device_memory_limit=20GB", "adam_epsilon=1e-8"),
    ],
)
def test_a_dumped_config_loads_to_an_equal_one(words: tuple[str, ...], tmp_path: Path) -> None:
    config = load(*words)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config([str(path)]) == (config, [])
    yaml.safe_load(path.read_text())  # and any reader takes it


# keys


def test_an_unknown_key_names_the_nearest_one() -> None:
    assert error("learning_rat=1e-4") == "unknown key: learning_rat\nhint: learning_rate"
    assert error("--lora-rnk", "8") == "unknown key: lora_rnk\nhint: lora_r"
    assert error("xyzzy=1") == "unknown key: xyzzy\nhint: roundpipe schema lists every key"
    two = error("batchsize=1", "maxlength=2")
    assert two.endswith("hint: batchsize → batch_size, maxlength → max_length")


def test_aliases_become_ours_and_are_said_in_one_line() -> None:
    config, said = make_config({"base_model": "m", "datasets": [{"path": "d.jsonl"}], "lr": 1e-4})
    assert (config.model_name_or_path, config.learning_rate) == ("m", 1e-4)
    assert said == []  # given by the caller, who knows what was written

    in_file = "model: m\ndatasets: [{path: d.jsonl}]\nlora_rank: 4\nbatch_size: 2\n"
    assert _from_file(in_file)[1] == [
        "read as ours: model is model_name_or_path, datasets is dataset, lora_rank is lora_r"
    ]


def _from_file(text: str, *words: str) -> tuple[TrainConfig, list[str]]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(text)
        return load_config([str(path), *words])


def test_the_command_line_wins_whatever_the_name() -> None:
    file = "model: m\ndataset: d.jsonl\nlr: 1e-3\nbf16: true\nper_device_train_batch_size: 4\n"
    config, _ = _from_file(file, "learning_rate=1e-4", "dtype=fp32", "batch_size=3")
    assert (config.learning_rate, config.dtype, config.batch_size) == (1e-4, "fp32", 3)
    config, _ = _from_file(file, "devices=cpu*2", "gradient_accumulation_steps=8")
    assert config.batch_size == 64
    config, _ = _from_file("model: m\ndataset: d\ndtype: fp32\nbatch_size: 9\n", "bf16=true")
    assert (config.dtype, config.batch_size) == ("bf16", 9)


LLAMA_FACTORY = """
model_name_or_path: m
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: d.jsonl
template: qwen
cutoff_len: 1024
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: o
logging_steps: 10
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
devices: cpu*2
"""
AXOLOTL = """
base_model: m
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: d.jsonl
    type: chat_template
    field_messages: conversations
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./o
sequence_len: 1024
sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
evals_per_epoch:
weight_decay: 0.0
devices: cpu*2
"""


def test_whole_configs_of_other_trainers_are_taken() -> None:
    theirs, said = _from_file(LLAMA_FACTORY)
    assert (theirs.lora_r, theirs.batch_size, theirs.max_length) == (8, 16, 1024)
    assert (theirs.warmup_steps, theirs.dtype, theirs.eval_steps) == (0.1, "bf16", 500)
    assert [line.split(":")[0] for line in said] == [
        "read as ours",
        "not needed here",
        "not used",
        "bf16",
        "warmup_ratio",
        "batch_size",
        "not in the file, so as it is here",
    ]
    theirs, _ = _from_file(AXOLOTL)
    assert (theirs.batch_size, theirs.micro_batch_size, theirs.lora_r) == (16, None, 32)
    assert theirs.dataset[0].columns == {"messages": "conversations"}


def test_one_setting_under_two_names_must_agree() -> None:
    assert "given twice: lr: 1, learning_rate: 2" in error("lr=1", "learning_rate=2")
    assert load("lr=1", "learning_rate=1").learning_rate == 1
    assert "disagree" in error("bf16=true", "dtype=fp32")
    assert "disagree" in error("bf16=true", "fp16=true")


@pytest.mark.parametrize(
    ("words", "batch_size", "said"),
    [
        (
            ("per_device_train_batch_size=2", "devices=cpu*2"),
            4,
            "batch_size: 4 (2 x 1 x 2 devices)",
        ),
        (
            ("micro_batch_size=2", "gradient_accumulation_steps=4", "devices=[cuda:0, cuda:1*2]"),
            24,
            "batch_size: 24 (2 x 4 x 3 devices)",
        ),
        (("gradient_accumulation_steps=4", "devices=3"), 96, "batch_size: 96 (8 x 4 x 3 devices)"),
        (
            ("sequence_len=64", "gradient_accumulation_steps=4", "devices=3"),
            12,
            "batch_size: 12 (1 x 4 x 3 devices)",
        ),
    ],
)
def test_a_batch_per_device_becomes_samples_per_step(
    words: tuple[str, ...], batch_size: int, said: str
) -> None:
    config, notes = load_config([*BASE, *words])
    assert config.batch_size == batch_size
    assert config.micro_batch_size is None
    assert said.replace(" x ", " \N{MULTIPLICATION SIGN} ") in notes


def test_micro_batch_size_alone_is_ours() -> None:
    assert load("micro_batch_size=2").micro_batch_size == 2
    assert load("micro_batch_size=2").batch_size == 16


def test_a_batch_given_in_both_ways_is_an_error() -> None:
    message = error("batch_size=8", "gradient_accumulation_steps=2", "devices=cpu")
    assert message.startswith("batch_size: 8 stands beside gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"adapter": ""}, "finetuning_type", "full"),
        ({"adapter": "lora"}, "finetuning_type", "lora"),
        ({"use_peft": False}, "finetuning_type", "full"),
        ({"method": "full"}, "finetuning_type", "full"),
        ({"adapter": "qlora"}, "finetuning_type", "qlora"),
        ({"adapter": "qlora", "load_in_4bit": True}, "finetuning_type", "qlora"),
        ({"load_in_4bit": True, "adapter": "lora"}, "finetuning_type", "qlora"),
        ({"use_peft": True, "load_in_4bit": True}, "finetuning_type", "qlora"),
        ({"finetuning_type": "lora", "quantization_bit": 4}, "finetuning_type", "qlora"),
        ({"quantization_bit": 4}, "finetuning_type", "qlora"),
        ({"bf16": True}, "dtype", "bf16"),
        ({"fp16": True}, "dtype", "fp16"),
        ({"torch_dtype": "float16"}, "dtype", "fp16"),
        ({"torch_dtype": "bfloat16"}, "dtype", "bf16"),
        ({"fp16": False}, "dtype", "auto"),
        ({"optim": "adamw_torch_fused"}, "optim", "adamw_torch"),
        ({"optimizer": "paged_adamw_32bit"}, "optim", "adamw_torch"),
        ({"optim": "adamw_8bit"}, "optim", "adamw_torch"),
        ({"optim": "adamw_bnb_8bit"}, "optim_state_dtype", "int8"),
        ({"optimizer": "paged_adamw_8bit"}, "optim_state_dtype", "int8"),
        ({"optim": "adamw_8bit", "optim_state_dtype": "bf16"}, "optim_state_dtype", "bf16"),
        ({"lora_target_parameters": "a.down, up"}, "target_parameters", ("a.down", "up")),
        ({"host_memory_limit": "64GB"}, "host_memory_limit", 64 * 10**9),
        ({"pinned_memory_limit": "1 GiB"}, "pinned_memory_limit", 2**30),
        ({"pinned_memory_limit": 0.8}, "pinned_memory_limit", 0.8),
        ({"host_memory_limit": 1}, "host_memory_limit", 1.0),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"lr_scheduler": "wsd"}, "lr_scheduler_type", "warmup_stable_decay"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "lr_scheduler_type", "cosine"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "min_lr_ratio", 0.1),
        ({"lora_target": "all"}, "target_modules", "all-linear"),
        ({"lora_target": "q_proj, v_proj"}, "target_modules", ("q_proj", "v_proj")),
        ({"target_modules": r".*\.(q|v)_proj"}, "target_modules", r".*\.(q|v)_proj"),
        ({"lora_target_linear": True}, "target_modules", "all-linear"),
        ({"additional_target": "lm_head"}, "modules_to_save", ("lm_head",)),
        ({"train_on_inputs": True}, "train_on_prompt", True),
        ({"assistant_only_loss": False}, "train_on_prompt", True),
        ({"completion_only_loss": True}, "train_on_prompt", False),
        ({"flash_attn": "fa2"}, "attn_implementation", "sdpa"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation", "sdpa"),
        ({"model_revision": "abc"}, "model_name_or_path", "m@abc"),
        ({"val_set_size": 0.05}, "val_size", 0.05),
        ({"val_set_size": 0}, "val_size", None),
        ({"report_to": "none"}, "report_to", ()),
        ({"report_to": []}, "report_to", ()),
        ({"report_to": "wandb,tensorboard"}, "report_to", ("wandb", "tensorboard")),
        ({"wandb_project": "x"}, "report_to", ("wandb",)),
        ({"wandb_project": "x"}, "project", "x"),
        (
            {"wandb_project": "x", "use_wandb": True, "report_to": ["wandb"]},
            "report_to",
            ("wandb",),
        ),
        ({"wandb_project": "x", "wandb_mode": "disabled"}, "report_to", ()),
        ({"mlflow_experiment_name": "x"}, "project", "x"),
        ({"chat_template": "tokenizer_default"}, "chat_template", "auto"),
        ({"sample_prompts": "one"}, "sample_prompts", ("one",)),
    ],
)
def test_habits_of_other_trainers_become_ours(given: Any, field: str, value: Any) -> None:
    config, _ = make_config({"model_name_or_path": "m", "dataset": "d", **given})
    assert getattr(config, field) == value


def test_an_optimizer_of_8_bits_is_said_once() -> None:
    assert notes(optim="paged_adamw_8bit") == [
        "optim: paged_adamw_8bit is adamw_torch with optim_state_dtype: int8"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("load_in_4bit=true", "method=full"), "4-bit weights cannot be trained: load_in_4bit"),
        (("use_peft=false", "quantization_bit=4"), "4-bit weights cannot be trained: quantiz"),
        (("method=qlora", "use_dora=true"), "use_dora takes the size of the base weights apart"),
        (("method=qlora", "peft={init_lora_weights: pissa}"), "peft: init_lora_weights takes"),
        (("pinned_memory_limit=much",), "pinned_memory_limit: not an amount of memory: much"),
        (("host_memory_limit=-1",), "host_memory_limit: not an amount of memory: -1"),
        (("host_memory_limit=0",), "host_memory_limit: not an amount of memory: 0"),
        (("optim_state_dtype=fp8",), "optim_state_dtype: fp8 is not 'fp32', 'bf16' or 'int8'"),
    ],
)
def test_what_weights_in_4_bits_or_memory_cannot_be_is_an_error(
    words: tuple[str, ...], message: str
) -> None:
    said = error(*words)
    assert said.startswith(message)
    assert "\nhint: " in said


def test_what_is_not_needed_is_named_in_one_line_and_nothings_are_dropped() -> None:
    given = {"deepspeed": "z3.json", "gradient_checkpointing": True, "fsdp": None, "tf32": False}
    assert notes(**given) == ["not needed here: deepspeed, gradient_checkpointing"]
    assert notes(packing=False, wandb_project="", save_steps=None, load_in_4bit=False) == []
    assert notes(template="qwen") == [
        "not used: template: qwen (the model's own; see the marked sample)"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("load_in_8bit=true",), "not supported: load_in_8bit: true"),
        (("quantization_bit=8",), "not supported: quantization_bit: 8"),
        (("quantization_config={bits: 4}",), "not supported: quantization_config"),
        (("quantization_config={quant_method: gptq}",), "not supported: quantization_config"),
        (("report_to=comet_ml",), "not supported: report_to: comet_ml\nhint: report_to=none"),
        (("rl=dpo",), "not yet: rl: dpo\nhint: "),
        (("stage=ppo",), "not yet: stage: ppo\nhint: "),
        (("push_to_hub=true",), "not supported: push_to_hub: true\nhint: push_to_hub=none, and up"),
        (("added_tokens=[x]",), "not supported: added_tokens"),
        (("num_generations=8",), "not supported: num_generations: 8\nhint: num_generations=none: "),
        (("label_smoothing_factor=0.1",), "not supported: label_smoothing_factor: 0.1"),
        (("plugins=[mine.Plugin]",), "not supported: plugins: mine.Plugin"),
        (("lr_scheduler_kwargs={power: 2}",), "not supported: lr_scheduler_kwargs: power: 2"),
        (("lr_scheduler_kwargs={min_lr: 1e-5}",), "min_lr: 1e-05 is a share of a learning_rate"),
        (("training=3",), "not supported: training: 3\nhint: a section"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(words: tuple[str, ...], message: str) -> None:
    said = error(*words)
    assert said.startswith(message)
    assert "\nhint: " in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lr=abc",), "learning_rate: abc is not a valid number"),
        (("batch_size=0",), "batch_size: 0 is not greater than or equal to 1"),
        (("batch_size=2.5",), "batch_size: 2.5 is not a valid integer"),
        (("batch_size=two",), "batch_size: two is not a valid integer\nhint: batch_size: samples"),
        (("--batch-size",), "batch_size: true is no value\nhint: batch_size: samples per"),
        (
            ("finetuning_type=loar",),
            "finetuning_type: loar is not 'lora', 'full', 'qlora' or 'freeze'",
        ),
        (("staleness=2",), "staleness: 2 is not 0 or 1\nhint: staleness=0"),
        (("dataset=3",), "dataset.0: 3 is not a valid dictionary"),
        (("dataset=[{path: a, fath: b}]",), "unknown key: dataset.0.fath\nhint: path"),
        (("dataset=[]",), "dataset: "),
        (("devices=gpu",), "devices: not a device: gpu\nhint: devices=auto"),
        (("devices=0",), "devices: not a number of devices: 0"),
        (("devices=[]",), "devices: no device is named"),
        (("warmup_steps=2.5",), "warmup_steps: neither a share"),
        (("device_memory_limit=20 parsecs",), "device_memory_limit: not an amount of memory"),
        (("device_memory_limit=0",), "device_memory_limit: 0 is not greater"),
        (("device_memory_limit=0.8",), "device_memory_limit: not yet as a share or a list: 0.8"),
        (("eval_steps=5",), "eval_strategy: steps, but there is no data"),
        (("val_size=0.1", "eval_dataset=e.jsonl"), "eval_dataset and val_size are both given"),
        (("min_lr_ratio=0.1", "lr_scheduler_type=linear"), "min_lr_ratio needs a schedule"),
        (("lr_scheduler_type=cosine_with_min_lr",), "lr_scheduler_type: cosine_with_min_lr, but"),
        (("load_best_model_at_end=true",), "load_best_model_at_end needs an evaluation"),
        (("early_stopping_patience=2",), "early_stopping_patience needs an evaluation"),
        (("save_strategy=best",), "save_strategy: best needs an evaluation"),
        (("unfrozen_parameters=norm", "method=full"), "unfrozen_parameters trains a part"),
        (("adapter_name_or_path=a", "method=full"), "adapter_name_or_path starts from an"),
        (("fp16_accumulation=true", "dtype=bf16"), "fp16_accumulation sums products of fp16"),
        (("resume_from_checkpoint=no/such",), "no such checkpoint: resume_from_checkpoint: no/su"),
        (("packing=true", "train_sampling_strategy=group_by_length"), "packing fills rows"),
        (("mask_history=true", "train_on_prompt=true"), "train_on_prompt and mask_history"),
        (("micro_batch_size=3", "num_microbatch=4"), "batch_size: 16 is not num_microbatch: 4"),
    ],
)
def test_a_bad_value_is_one_paragraph_with_key_and_value(
    words: tuple[str, ...], message: str
) -> None:
    found = error(*words)
    assert found.startswith(message)
    assert "pydantic" not in found
    assert len(found.splitlines()) <= 2


def test_what_must_be_given_is_asked_for() -> None:
    assert (
        error(base=())
        == "no model_name_or_path is given\nhint: model=FOLDER, a hub id or a GGUF file"
    )
    assert error(base=("model=m",)) == "no dataset is given\nhint: dataset=FILE.jsonl"


def test_adapter_settings_beside_full_fine_tuning_are_said() -> None:
    said = notes(finetuning_type="full", lora_r=8, use_dora=False)
    assert said == ["not used with finetuning_type=full: lora_r"]


def test_dataset_entries_of_other_trainers_are_read() -> None:
    entry = {"path": "d.json", "type": "alpaca", "field_output": "reply", "ds_type": "json"}
    config, _ = make_config({"model": "m", "datasets": [entry]})
    assert config.dataset[0].type == "instruction/output"
    assert config.dataset[0].columns == {"output": "reply"}
    assert load("dataset={path: d, type: completion}").dataset[0].type == "text"
    assert load("dataset={path: d, type: chat_template}").dataset[0].type is None


def test_nothing_of_a_config_imports_torch() -> None:
    code = (
        "import sys; from roundpipe.finetune.settings.config import load_config; "
        "load_config(['model=m', 'dataset=d', 'per_device_train_batch_size=2', 'devices=cpu']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_says_what_it_is() -> None:
    for name, field in TrainConfig.model_fields.items():
        assert field.description, name


def test_defaults_that_other_trainers_have_otherwise_are_said_of_their_files() -> None:
    begin = "model_name_or_path: m\ndataset: d.jsonl\nper_device_train_batch_size: 2\n"
    own = "model_name_or_path: m\ndataset: d.jsonl\nbatch_size: 2\n"
    left = "not in the file, so as it is here: "
    [line] = [
        line for line in _from_file(f"{begin}lora_alpha: 8\nmax_steps: 5\n")[1] if left in line
    ]
    assert line.removeprefix(left) == (
        "max_length: 2048, learning_rate: 0.0002, lr_scheduler_type: cosine, warmup_steps: 0.03, "
        "lora_r: 16, target_modules: all-linear"
    )
    full = "\n".join(_from_file(f"{begin}finetuning_type: full\n")[1])
    assert "learning_rate: 1e-05" in full
    assert "lora_r" not in full
    assert _from_file(own)[1] == []


@pytest.mark.parametrize(
    ("text", "trains_prompt"),
    [
        ("assistant_only_loss: false", True),
        ("completion_only_loss: false", True),
        ("train_on_completions: false", True),
        ("assistant_only_loss: false\ncompletion_only_loss: true", False),
        ("completion_only_loss: false\nassistant_only_loss: true", False),
        ("completion_only_loss: null", False),
    ],
)
def test_a_no_to_answers_alone_counts_in_a_file_too(text: str, trains_prompt: bool) -> None:
    config, _ = _from_file(f"model: m\ndataset: d.jsonl\n{text}\n")
    assert config.train_on_prompt is trains_prompt


def test_weights_of_the_base_are_trained_at_its_rate() -> None:
    given = {"model": "m", "dataset": "d.jsonl"}
    rates = {
        method: make_config({**given, "finetuning_type": method})[0].learning_rate
        for method in ("lora", "qlora", "full", "freeze")
    }
    assert rates == {"lora": 2e-4, "qlora": 2e-4, "full": 1e-5, "freeze": 1e-5}


def test_words_that_mean_no_clipping_and_all_layers() -> None:
    given = {"model": "m", "dataset": "d.jsonl"}
    for nothing in (0, 0.0, None):
        assert make_config({**given, "max_grad_norm": nothing})[0].max_grad_norm is None
    for every in ("all", ["all"], ["all-linear"]):
        assert make_config({**given, "lora_target": every})[0].target_modules == "all-linear"
    with pytest.raises(ConfigError, match="not a share below 1: warmup_ratio: 2"):
        make_config({**given, "warmup_ratio": 2})
