from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.finetune.model import base_model
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.from_transformers import load_model, quiet_transformers
from roundpipe.finetune.model.source import ModelSource, locate_model
from roundpipe.finetune.output.terminal import Terminal

if TYPE_CHECKING:
    from types import ModuleType

    from roundpipe.finetune.model.base_model import BaseModel


def load(folder: Path, method: str = "lora", dtype: torch.dtype = torch.float32) -> BaseModel:
    return load_base(locate_model(str(folder)), method, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_from_files_lie_in_segments_and_are_those_of_transformers(
    tiny_folder: Path, dtype: torch.dtype
) -> None:
    base = load(tiny_folder, dtype=dtype)
    plain: Any = load_model(locate_model(str(tiny_folder)), dtype=dtype)
    state = plain.state_dict()
    assert base.model.state_dict().keys() == state.keys()
    assert all(torch.equal(base.model.state_dict()[name], state[name]) for name in state)
    tables = base.model.get_input_embeddings().weight, base.model.get_output_embeddings().weight
    assert tables[0] is tables[1]
    assert base.model.config.to_dict() == plain.config.to_dict()
    assert not base.model.training
    assert not base.is_packed
    held = {id(tensor) for each in base.bases for tensor in each.tensors.values()}
    assert held == {id(parameter) for parameter in base.model.parameters()}


def test_what_our_loader_refuses_is_loaded_by_transformers_and_the_log_says_why(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("weights in a form that is not read: own\nhint: none")

    monkeypatch.setattr(base_model, "open_causal_lm", refuse)
    with caplog.at_level("INFO", logger="roundpipe"):
        base = load(tiny_folder)
    assert (base.bases, base.is_packed) == ([], False)
    assert next(base.model.parameters()).isfinite().all()
    assert "transformers loads the model: weights in a form that is not read: own" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot load .* in 4 bits: weights in a form"):
        load(tiny_folder, "qlora")


def test_weights_that_the_files_do_not_hold_are_told_as_ever(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "cut"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as told:
        load(folder)
    assert str(told.value).startswith("model_name_or_path: 1 weights of LlamaForCausalLM are not")
    with pytest.raises(ConfigError, match=r"(?s)in 4 bits: 1 weights .*hint: they would start"):
        load(folder, "qlora")


def test_files_in_4_bits_take_adapters_and_nothing_else(tiny: ModuleType, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = tiny.write_tiny_folder(tmp_path / "whole", **sizes)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=in_4_bits)
    packed.save_pretrained(tmp_path / "packed")
    assert load(tmp_path / "packed", "lora").is_packed
    assert load(tmp_path / "packed", "qlora").is_packed
    with pytest.raises(ConfigError, match=r"(?s)cannot be trained in full.*hint: finetuning_type="):
        load(tmp_path / "packed", "full")


def test_a_gguf_file_is_unpacked_and_packed_again_for_qlora(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    monkeypatch.setattr(base_model, "load_model", lambda *_, **__: tiny.tiny_model(**sizes))
    monkeypatch.setattr(base_model, "open_causal_lm", None)
    source = ModelSource("m.gguf", ".", gguf_file="m.gguf")
    whole = load_base(source, "lora", dtype=torch.float32)
    assert (whole.bases, whole.is_packed) == ([], False)
    packed = load_base(source, "qlora", dtype=torch.float32)
    assert packed.is_packed
    assert len(packed.bases) == 2
    assert packed.model.model.layers[0].mlp.up_proj.weight.isnan().all()
    assert packed.model.lm_head.weight.isfinite().all()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_class_without_code_for_sdpa_runs_its_own_attention(tmp_path: Path, method: str) -> None:
    config = Gemma2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    with quiet_transformers():
        Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    stream = io.StringIO()
    source = locate_model(str(tmp_path))
    terminal = Terminal(stream, patience=600)
    base = load_base(source, method, dtype=torch.float32, terminal=terminal)
    assert base.is_packed == (method == "qlora")
    assert base.model.config._attn_implementation == "eager"
    assert stream.getvalue().startswith("attn_implementation: eager; ")
