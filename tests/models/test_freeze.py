from __future__ import annotations

import pytest
import torch
from tests.models import multimodal_cases
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.models.freeze import unfrozen


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, tie_word_embeddings=True))


def layers_of(names: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[2] for name in names if ".layers." in name}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("layers:-1", {"3"}),
        ("layers:2", {"0", "1"}),
        ("layers:-4", {"0", "1", "2", "3"}),
        (r"layers\.(1|3)\.", {"1", "3"}),
        ("layers:-2:mlp|norm", {"2", "3"}),
    ],
)
def test_a_pattern_names_blocks(model: LlamaForCausalLM, pattern: str, layers: set[str]) -> None:
    found = unfrozen(model, [pattern])
    assert layers_of(found) == layers
    assert all(".layers." in name for name in found)
    if "mlp" in pattern:
        assert all("mlp" in name or "norm" in name for name in found)


def test_patterns_add_up_and_are_found_anywhere_in_a_name(model: LlamaForCausalLM) -> None:
    found = unfrozen(model, ["^model.norm", r"q_proj\.weight$"])
    assert set(found) == {
        "model.norm.weight",
        *(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)),
    }


def test_a_tied_weight_is_found_by_either_name(model: LlamaForCausalLM) -> None:
    (head,) = unfrozen(model, ["lm_head"]).values()
    (table,) = unfrozen(model, ["embed_tokens"]).values()
    assert head is table


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["norm", "q_porj"], r"(?s)no weight is called like q_porj\nhint: .*q_proj"),
        (["layers:5"], r"(?s)layers:5: the model has 4 blocks\nhint: .*layers:-2"),
        (["layers:0"], "the model has 4 blocks"),
        (["layers:-1:nothing"], "no weight is called like layers:-1:nothing"),
        (["("], r"(?s)not a regular expression: \(.*hint"),
        ([r"model.embed_tokens.weight$[:32000]"], "no weight is called like"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(
    model: LlamaForCausalLM, patterns: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        unfrozen(model, patterns)


def test_towers_that_no_text_reaches_are_not_meant() -> None:
    found = unfrozen(multimodal_cases.model("gemma3"), ["layers"])
    assert found
    assert not any("vision" in name for name in found)
