"""Configs in the words of other trainers, through a whole short run."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.settings.config import load_config

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LLAMA_FACTORY: dict[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "freeze",
    "freeze_trainable_layers": 1,
    "template": "qwen",
    "cutoff_len": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "disable_shuffling": True,
    "deepspeed": "ds_z3.json",
}
AXOLOTL: dict[str, Any] = {
    "load_in_8bit": False,
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_linear": True,
    "sequence_len": 64,
    "sample_packing": True,
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 1,
    "optimizer": "adamw_8bit",
    "flash_attention": True,
    "evals_per_epoch": None,
    "special_tokens": {"pad_token": "<pad>", "eos_token": "<|im_start|>"},
}


@pytest.mark.parametrize(
    ("theirs", "model", "data"),
    [(LLAMA_FACTORY, "model_name_or_path", "dataset"), (AXOLOTL, "base_model", "datasets")],
    ids=["llamafactory", "axolotl"],
)
def test_a_config_of_another_trainer_runs(
    theirs: dict[str, Any],
    model: str,
    data: str,
    tiny_folder: Path,
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    dataset: Any = str(tiny_data) if data == "dataset" else [{"path": str(tiny_data)}]
    places = {model: str(tiny_folder), data: dataset, "output_dir": str(tmp_path / "out")}
    file = tmp_path / "their.yaml"
    file.write_text(yaml.safe_dump({**theirs, **places, "max_steps": 2, "learning_rate": 1e-3}))
    config, notes = load_config([str(file), "devices=cpu"])
    shown = io.StringIO()
    result = train(config, notes, terminal=Terminal(shown))
    assert [record["step"] for record in result.history] == [1, 2]
    assert "not needed here: " in shown.getvalue() or "read as ours: " in shown.getvalue()
    if "special_tokens" in theirs:
        saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
        assert saved["eos_token"] == "<|im_start|>"
    again, notes = load_config([str(tmp_path / "out" / "config.yaml")])
    assert again == config
    assert notes == []
