"""A checkpoint that also sees is trained on text and written back as one that sees."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers
from tests.models import multimodal_cases
from transformers.utils import logging as transformers_logging

from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.loop import train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.arange(40).reshape(2, 20)


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    """Bars run a thread that outlives a test."""
    settings: Any = transformers_logging
    settings.disable_progress_bar()
    yield
    settings.enable_progress_bar()


@pytest.fixture
def folder(tiny: ModuleType, tmp_path: Path, kind: str) -> Path:
    """A model folder with tokenizer and image processor."""
    base = tmp_path / "base"
    multimodal_cases.model(kind, more_tokens=180).save_pretrained(base)
    tiny.tiny_tokenizer().save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")
    return base


def run(config: Any) -> tuple[Any, str]:
    stream = io.StringIO()
    result = train(config, [], terminal=Terminal(stream))
    return result, stream.getvalue()


def stock(place: Path, kind: str) -> Any:
    loader: Any = getattr(transformers, kind)
    model, info = loader.from_pretrained(place, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


@pytest.mark.accept
@pytest.mark.parametrize("kind", ["gemma3"])
def test_a_full_run_leaves_the_tower_as_it_was_and_moves_all_else(
    folder: Path, config_of: Any
) -> None:
    config = config_of(
        model_name_or_path=str(folder), finetuning_type="full", val_size=2, eval_steps=3
    )
    result, said = run(config)
    before = stock(folder, "Gemma3ForConditionalGeneration").state_dict()
    model = stock(result.folder, "Gemma3ForConditionalGeneration")
    beside = ("model.vision_tower.", "model.multi_modal_projector.")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith(beside), name
    assert (result.folder / "preprocessor_config.json").is_file()
    assert "model = AutoModelForCausalLM.from_pretrained(" in said


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.accept)])
def test_an_adapter_is_on_the_text_alone_and_loads_onto_the_checkpoint_s_own_class(
    folder: Path, config_of: Any, kind: str
) -> None:
    config = config_of(model_name_or_path=str(folder), sample_prompts=["what is 1?"])
    result, said = run(config)
    settings = json.loads((result.folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    loaded = peft.PeftModel.from_pretrained(stock(folder, name), result.folder)
    answer = loaded.load_adapter(str(result.folder), "again")
    assert not answer.missing_keys
    assert not answer.unexpected_keys
    adapted = [n for n, _ in loaded.named_parameters() if ".lora_A.default" in n]
    assert len(adapted) == 2 * 7  # attention and MLP of two blocks
    assert all(".language_model.layers." in n for n in adapted)
    assert not torch.equal(logits(loaded.eval()), logits(stock(folder, name)))
    auto = "Qwen2VLForConditionalGeneration" if kind == "qwen2_vl" else "AutoModelForCausalLM"
    assert f"base = {auto}.from_pretrained({str(folder)!r})" in said


@pytest.mark.accept
@pytest.mark.parametrize("kind", ["gemma3"])
def test_names_that_a_tower_shares_are_adapted_in_the_text_alone(
    folder: Path, config_of: Any
) -> None:
    config = config_of(model_name_or_path=str(folder), target_modules=["q_proj"])
    result, _ = run(config)
    loaded = peft.PeftModel.from_pretrained(
        stock(folder, "Gemma3ForConditionalGeneration"), result.folder
    )
    adapted = [n for n, _ in loaded.named_parameters() if ".lora_A." in n]
    assert len(adapted) == 2
    assert not any("vision" in n for n in adapted)
