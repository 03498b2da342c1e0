from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.finetune.model.trained import prepared, train, train_plainly
from tests.models.fake_hub import FakeHub, fake_hub
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.started import adapter_folder
from roundpipe.models.loading.hub import Hub

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that peft made and trained, of another rank than our configs'."""
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(3)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, lora)
        train_plainly(model, 2)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(adapter: Path, tmp_path: Path) -> Path:
    return shutil.copytree(adapter, tmp_path / "copied")


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_training_starts_where_the_adapter_ended_with_the_adapters_own_settings(
    config_of: Any, adapter: Path, tiny_folder: Path
) -> None:
    lines: list[str] = []
    config = config_of(adapter_name_or_path=str(adapter), lora_r=16, target_modules="all-linear")
    base, model = prepared(config, lines)
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, set(lora.target_modules)) == (3, 5, {"q_proj"})
    assert lora.base_model_name_or_path == str(tiny_folder)
    assert lines == [
        f"starts from the adapter {adapter} (r=3); its settings count, lora_* keys do not"
    ]
    assert all(("lora_" in n) == p.requires_grad for n, p in model.named_parameters())
    losses, _ = train(base, model, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny_folder), adapter, is_trainable=True
        )
    assert losses == pytest.approx(train_plainly(plain, 2), abs=1e-5)


def test_another_name_of_the_base_is_said(config_of: Any, copied: Path) -> None:
    edit(copied, base_model_name_or_path="own/other")
    lines: list[str] = []
    prepared(config_of(adapter_name_or_path=str(copied)), lines)
    assert "was trained on own/other" in lines[1]


def test_an_adapter_of_a_larger_model_is_refused_by_its_shapes(
    config_of: Any, copied: Path, tiny: ModuleType, tmp_path: Path
) -> None:
    other = tiny.write_tiny_folder(tmp_path / "other", hidden_size=64)
    config = config_of(adapter_name_or_path=str(copied), model_name_or_path=str(other))
    with pytest.raises(
        ConfigError, match=r"(?s)does not fit .*other: .*q_proj.*shape.*\nhint: mod"
    ):
        prepared(config)


def test_an_adapter_of_a_deeper_model_is_refused_by_what_has_no_place(
    config_of: Any, copied: Path, tiny: ModuleType, tmp_path: Path
) -> None:
    other = tiny.write_tiny_folder(tmp_path / "other", num_layers=1)
    config = config_of(adapter_name_or_path=str(copied), model_name_or_path=str(other))
    with pytest.raises(ConfigError, match=r"no place for: .*layers\.1\..*\(2 in all\)"):
        prepared(config)


def test_a_key_that_is_missing_is_an_error(config_of: Any, copied: Path) -> None:
    weights = load_file(copied / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(weights, copied / "adapter_model.safetensors")
    lacks = r"its file lacks .*layers\.1\..*lora_B.*\(1 in all\)\nhint: the file is not as peft"
    with pytest.raises(ConfigError, match=lacks):
        prepared(config_of(adapter_name_or_path=str(copied)))


def test_weights_of_whole_numbers_are_refused(config_of: Any, copied: Path) -> None:
    weights = load_file(copied / "adapter_model.safetensors")
    whole = {name: tensor.to(torch.int8) for name, tensor in weights.items()}
    save_file(whole, copied / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"no floating point numbers: .*lora_A.* is int8"):
        prepared(config_of(adapter_name_or_path=str(copied)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "not a LoRA adapter: .*: IA3"),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "names code of its own.*megatron"),
        ({"r": "many"}, "adapter_name_or_path"),
    ],
)
def test_a_config_that_is_no_lora_is_refused(
    config_of: Any, copied: Path, fields: dict[str, Any], words: str
) -> None:
    edit(copied, **fields)
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        prepared(config_of(adapter_name_or_path=str(copied)))


@pytest.mark.parametrize(
    "fields", [{"init_lora_weights": "pissa_niter_4"}, {"alora_invocation_tokens": [5]}]
)
def test_an_adapter_that_would_be_another_here_is_refused_by_name(
    config_of: Any, copied: Path, fields: dict[str, Any]
) -> None:
    edit(copied, **fields)
    with pytest.raises(ConfigError, match=rf"adapter_name_or_path: .*copied: {next(iter(fields))}"):
        prepared(config_of(adapter_name_or_path=str(copied)))


def test_settings_that_read_the_base_do_not_go_with_4_bits(
    config_of: Any, copied: Path, tiny: ModuleType, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = tiny.write_tiny_folder(tmp_path / "m", **sizes)
    edit(copied, use_dora=True)
    config = config_of(
        finetuning_type="qlora",
        model_name_or_path=str(folder),
        adapter_name_or_path=str(copied),
    )
    with pytest.raises(ConfigError, match=r"use_dora takes the base weights apart"):
        prepared(config)


def test_a_pickle_and_a_torn_file_are_not_opened(config_of: Any, copied: Path) -> None:
    weights = copied / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="not a sound safetensors file"):
        prepared(config_of(adapter_name_or_path=str(copied)))
    weights.rename(copied / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"(?s)no adapter_model.safetensors.*a pickle"):
        adapter_folder(str(copied))


@pytest.mark.parametrize("given", ["./nowhere", "a/b/c"])
def test_a_wrong_place_is_told(given: str, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no such folder: .*hint: give a folder"):
        adapter_folder(given)
    with pytest.raises(ConfigError, match=r"(?s)a whole model: .*hint: model_name_or_path="):
        adapter_folder(str(tiny_folder))


def test_an_adapter_comes_from_the_hub_too(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server: FakeHub
    with fake_hub() as server:
        server.repos["own/adapter"] = adapter
        hub = Hub(server.endpoint, tmp_path / "cache", token=False)
        folder = adapter_folder("own/adapter@main", hub=hub)
        assert load_file(folder / "adapter_model.safetensors").keys()
        with pytest.raises(ConfigError, match=r"^adapter_name_or_path: no such model on the hub"):
            adapter_folder("own/none", hub=hub)
