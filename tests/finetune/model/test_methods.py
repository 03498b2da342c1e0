"""What each method trains, against plain PyTorch; what is said of it; what stock peft opens."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from tests.finetune.model.trained import batches, prepared, train, train_plainly
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.base_model import BaseModel
from roundpipe.finetune.model.methods import prepare_method
from roundpipe.finetune.model.source import ModelSource
from roundpipe.models.saving import save

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

FOLDER = ModelSource(given="./base", location="base")


def opened(config: Any, folder: Path) -> Any:
    """What stock libraries make of a saved result."""
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base, folder)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=next(batches(1))).logits
    return found


TIED = "lm_head and model.embed_tokens are one weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True, "use_rslora": True}, None),
        ({"modules_to_save": "lm_head"}, f"{TIED} in the base and are two from here on: lm_head"),
        ({"modules_to_save": "embed_tokens"}, "are two from here on: model.embed_tokens trained"),
        (
            {"modules_to_save": "embed_tokens", "peft": {"ensure_weight_tying": True}},
            f"{TIED}, and stay one",
        ),
        ({"target_modules": ["lm_head", "q_proj"]}, "are two from here on: lm_head"),
        ({"finetuning_type": "freeze", "unfrozen_parameters": "lm_head"}, f"{TIED}: both are tr"),
        (
            {"finetuning_type": "freeze", "unfrozen_parameters": ["layers:-1", "model.norm"]},
            "trained: model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.k_proj",
        ),
    ],
)
def test_a_method_trains_as_plain_pytorch_does_and_its_files_open_in_stock_libraries(
    config_of: Any, tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    config = config_of(**changes)
    lines: list[str] = []
    base, model = prepared(config, lines)
    losses, newest = train(base, model, 2)
    _, plain = prepared(config)
    assert losses == pytest.approx(train_plainly(plain, 2), abs=1e-5)
    save(tmp_path / "result", model, newest)
    # Sums run in another order, and Adam divides what is nearly nothing by its own size.
    torch.testing.assert_close(
        logits(opened(config, tmp_path / "result")), logits(plain), atol=1e-4, rtol=0
    )
    assert lines == [] if words is None else any(words in line for line in lines), lines


def test_qlora_is_bitsandbytes_with_peft(config_of: Any, tiny: ModuleType, tmp_path: Path) -> None:
    """NF4 in blocks of 64, scales quantised once more, products in fp32 on a CPU."""
    from transformers import BitsAndBytesConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = tiny.write_tiny_folder(tmp_path / "m", **sizes)
    config = config_of(finetuning_type="qlora", model_name_or_path=str(folder))
    base, model = prepared(config)
    assert base.is_packed
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    losses, _ = train(base, model, 10)

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=in_4_bits)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = peft.get_peft_model(theirs, lora)
    missing, unexpected = plain.load_state_dict(start, strict=False)
    assert unexpected == []
    assert not any("lora" in name for name in missing)
    plain.train()
    expected = train_plainly(plain, 10)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0] - 0.01
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)


def test_weights_in_4_bits_are_not_trained_themselves(
    config_of: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = tiny.write_tiny_folder(tmp_path / "m", **sizes)
    of = {"finetuning_type": "qlora", "model_name_or_path": str(folder)}
    with pytest.raises(ConfigError, match=r"(?s)4 bits cannot be trained: .*down_proj.*hint: mod"):
        prepared(config_of(**of, modules_to_save=["down_proj"], target_modules=["q_proj"]))


def moe() -> BaseModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    few = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32}
    return BaseModel(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **few)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"], "lora_r": 2},
            "experts and routers add 384 trained weights to 256: 0.00 GB of host memory (20 bytes",
        ),
        (
            {"target_parameters": ["mlp.experts.down_proj"], "optim_state_dtype": "int8"},
            "of host memory (14 bytes each)",
        ),
        ({"target_modules": ["q_proj", "gate"]}, "experts and routers add 80 trained weights"),
    ],
)
def test_adapters_on_routed_experts_are_asked_for_and_what_they_add_is_said(
    config_of: Any, changes: dict[str, Any], words: str | None
) -> None:
    lines: list[str] = []
    config = config_of(**changes)
    prepare_method(moe(), config, FOLDER, say=lines.append)
    assert lines == [] if words is None else words in lines[0], lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": ["q_proj", "v_porj"]}, r"v_porj\nhint: target_modules=q_proj, v_proj"),
        ({"modules_to_save": ["lm_haed"]}, r"lm_haed\nhint: modules_to_save=lm_head"),
        ({"target_modules": "nothing.*"}, "target_modules|not found"),
        ({"target_parameters": ["mlp.experts.up"]}, r"target_parameters: nothing.*mlp.experts.up"),
        ({"finetuning_type": "freeze", "unfrozen_parameters": ["q_porj"]}, "no weight is called"),
        (
            {"target_modules": ["embed_tokens"], "peft": {"ensure_weight_tying": True}},
            "ensure_weight_tying ties adapters",
        ),
    ],
)
def test_a_name_that_names_nothing_is_an_error_with_what_was_meant(
    config_of: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words}") as told:
        prepared(config_of(**changes))
    assert "\nhint: " in str(told.value)


def test_nothing_trained_is_an_error(config_of: Any) -> None:
    config = config_of(target_modules=["q_proj"], peft={"layers_to_transform": [7]})
    with pytest.raises(ConfigError, match="hint: "):
        prepared(config)
