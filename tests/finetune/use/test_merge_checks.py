"""Mistakes that rounding to 16 bits would hide from a comparison of logits."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.finetune.tiny_model import tiny_model

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.use.merge_checks import (
    question_for,
    require_same_layer,
    require_same_weights,
    sample_of,
)

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_changed_places_in_the_files_are_found(dtype: torch.dtype) -> None:
    made = {"up": torch.randn(50, 70), "down": torch.randn(50, 70)}
    samples = {name: sample_of(tensor.half()) for name, tensor in made.items()}
    opened = {name: tensor.half().to(dtype) for name, tensor in made.items()}
    require_same_weights(samples, opened)
    opened["up"], opened["down"] = opened["down"], opened["up"]
    with pytest.raises(RoundPipeError, match="is opened as another: up"):
        require_same_weights(samples, opened)


def test_a_part_in_a_thousand_is_another_layer_and_sums_in_another_order_are_none() -> None:
    before = torch.randn(4, 50)
    require_same_layer("up", before, before * (1 + 1e-6))
    with pytest.raises(RoundPipeError, match="another than with its adapter: up"):
        require_same_layer("up", before, before * 1.001)


def test_tokens_that_are_trained_are_among_those_that_are_asked() -> None:
    lora = LoraConfig(trainable_token_indices=[5, 24], target_modules=["q_proj"])
    model = get_peft_model(tiny_model(tied=False), lora).get_base_model()
    asked = question_for(model.model.embed_tokens)
    assert asked is not None
    assert asked[-2:].tolist() == [5, 24]
    query = question_for(model.model.layers[0].self_attn.q_proj)
    assert query is not None
    assert query.shape == (4, 32)
    assert question_for(model.model.layers[0].mlp) is None
