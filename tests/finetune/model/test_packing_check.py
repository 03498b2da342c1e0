"""Which architectures keep packed samples apart, seen through the wrapped model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.finetune.model.packing_check import check_packing

VOCABULARY = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "gemma2": SLIDING,
    "qwen3_moe": EXPERTS,
}
APART_TOO: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": SLIDING,
    "phi3": {},
    "phi": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {},
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "starcoder2": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "stablelm": {},
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
    },
    "gpt_bigcode": GPT2,
}
MIXED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},  # ALiBi: no positions that could begin again
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # a causal mask of its own
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # convolutions see the tokens before
}
MIXED_TOO: dict[str, dict[str, Any]] = {
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "mamba": {"state_size": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 5},  # masks without positions, in 5.24
    "biogpt": {},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}


def tiny_model(kind: str, more: dict[str, Any], attention: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **more})
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ValueError:  # it has only the one
        if attention == "eager":
            raise
        return None
    for parameter in model.parameters():
        if parameter.dim() >= 2:  # so that a token sees those before it
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def check(kind: str, more: dict[str, Any], attention: str) -> None:
    model = tiny_model(kind, more, attention)
    if model is None:
        return
    with RoundPipe(model, devices="cpu*2") as trainer:
        check_packing(trainer, vocabulary=VOCABULARY)


def refused(kind: str, more: dict[str, Any], attention: str) -> None:
    model = tiny_model(kind, more, attention)
    if model is None:
        return
    name = type(model).__name__
    match = f"{name} mixes packed samples: .*\nhint: packing=false"
    with RoundPipe(model, devices="cpu*2") as trainer, pytest.raises(ConfigError, match=match):
        check_packing(trainer, vocabulary=VOCABULARY)


ATTENTION = pytest.mark.parametrize("attention", ["sdpa", "eager"])


@ATTENTION
@pytest.mark.parametrize("kind", APART)
def test_most_models_keep_packed_samples_apart(kind: str, attention: str) -> None:
    check(kind, APART[kind], attention)


@pytest.mark.parametrize("kind", MIXED)
def test_models_that_mix_them_are_refused_by_name(kind: str) -> None:
    refused(kind, MIXED[kind], "eager")


@pytest.mark.accept
@ATTENTION
@pytest.mark.parametrize("kind", [*APART_TOO, *MIXED_TOO, *MIXED])
def test_the_other_families(kind: str, attention: str) -> None:
    if kind in APART_TOO:
        check(kind, APART_TOO[kind], attention)
    else:
        refused(kind, {**MIXED_TOO, **MIXED}[kind], attention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_leak(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3_moe", EXPERTS, "sdpa").to(dtype)
    with RoundPipe(model, devices="cpu") as trainer:
        trainer.train()
        check_packing(trainer, vocabulary=VOCABULARY)
        assert trainer.training


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_an_adapter_on_the_model_changes_nothing() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model("llama", {}, "sdpa"), LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    )
    with RoundPipe(model, devices="cpu") as trainer:
        trainer.train()
        check_packing(trainer, vocabulary=VOCABULARY)
    mixing = get_peft_model(
        tiny_model("bloom", MIXED["bloom"], "eager"), LoraConfig(target_modules="all-linear")
    )
    with (
        RoundPipe(mixing, devices="cpu") as trainer,
        pytest.raises(ConfigError, match="BloomForCausalLM mixes packed samples"),
    ):
        check_packing(trainer, vocabulary=VOCABULARY)


class Fake:
    """A wrapped model that answers as told; its tokens are its logits."""

    training = True

    def __init__(self, answer: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self._answer = answer

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def eval(self) -> None:
        self.training = False

    def __call__(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        # A causal mean over what has come since position 0, as attention would be.
        logits = self._answer(input_ids.double()[..., None], position_ids)
        return SimpleNamespace(logits=logits)


def mean_of_sample(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, places in zip(tokens, positions.tolist(), strict=True):
        rows.append(torch.stack([row[i - at : i + 1].mean(0) for i, at in enumerate(places)]))
    return torch.stack(rows)


def test_what_tells_a_leak_from_none() -> None:
    apart = Fake(mean_of_sample)
    check_packing(apart, vocabulary=1000)  # type: ignore[arg-type]
    assert apart.training
    leaking = Fake(lambda ids, at: mean_of_sample(ids, at) + 0.2 * ids.cumsum(1))
    with pytest.raises(ConfigError, match="mixes packed samples"):
        check_packing(leaking, vocabulary=1000)  # type: ignore[arg-type]
    by_place = Fake(lambda ids, at: ids + 9.0 * torch.arange(ids.shape[1])[:, None])
    with pytest.raises(ConfigError, match="reads a packed sample otherwise than one alone"):
        check_packing(by_place, vocabulary=1000)  # type: ignore[arg-type]
    broken = Fake(lambda ids, at: mean_of_sample(ids, at) / 0.0 - torch.inf)
    with pytest.raises(ConfigError, match="mixes packed samples"):
        check_packing(broken, vocabulary=1000)  # type: ignore[arg-type]
    assert broken.training


def test_a_model_that_takes_no_positions_is_refused_with_its_own_words() -> None:
    def refuse(ids: Any, at: Any) -> Any:
        raise TypeError("forward() got an unexpected keyword argument 'position_ids'")

    match = "takes no packed samples: .*'position_ids'\nhint: packing=false"
    with pytest.raises(ConfigError, match=match):
        check_packing(Fake(refuse), vocabulary=100)  # type: ignore[arg-type]
