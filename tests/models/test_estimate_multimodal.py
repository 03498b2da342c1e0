"""Estimates of models that also see, and of those in which more than one hidden state travels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from roundpipe.errors import ModelError
from roundpipe.models.causal_lm import chain_of
from roundpipe.models.estimate import Profile, build, profile
from roundpipe.models.estimate.adapter import apply_method
from roundpipe.models.estimate.amount import Amount
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.meter import Answering
from roundpipe.models.estimate.method import Method

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
    "sliding_window": 32,
}
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", **TEXT},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 5,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}


@pytest.fixture(scope="module")
def gemma3():
    return profile(GEMMA3)


def test_a_vision_tower_is_of_the_host_and_of_no_layer(gemma3):
    text = profile({"model_type": "gemma3_text", **TEXT})
    assert text.unread == 0
    assert not text.notes
    assert gemma3.unread == gemma3.parameters - text.parameters > 0
    assert gemma3.trained_parameters == text.parameters
    assert [layer.sizes for layer in gemma3.layers] == [layer.sizes for layer in text.layers]
    assert gemma3.unread_bytes == 2 * gemma3.unread
    assert "model.vision_tower" in gemma3.notes[0]


def test_adapters_leave_out_what_text_does_not_reach():
    model, _ = build._build(make_config(GEMMA3), torch.bfloat16)
    apply_method(model, Method(name="lora"))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.startswith("model.language_model.") for name in trained)


def test_what_is_not_read_is_written_down_with_the_rest(gemma3):
    data = json.loads(json.dumps(gemma3.to_json()))
    assert Profile.from_json(data) == gemma3
    del data["unread"]
    assert Profile.from_json(data).unread == 0
    first, *others = gemma3.layers
    given = replace(gemma3, layers=(replace(first, boundary=Amount(0.0, 8.0)), *others))
    assert Profile.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_a_package_that_is_missing_leaves_out_the_tower_and_says_so(gemma3, monkeypatch):
    made = build._made

    def needs_more(config, dtype):
        if config.model_type == "gemma3":
            raise ImportError("\nTower requires the eyes library but it was not found. Install it.")
        return made(config, dtype)

    monkeypatch.setattr(build, "_made", needs_more)
    model, missing = build._build(make_config(GEMMA3), torch.bfloat16)
    assert missing == (
        "counted without what reads images or sound: Tower requires the eyes library but it was "
        "not found"
    )
    assert sum(p.numel() for p in model.parameters()) == gemma3.trained_parameters
    monkeypatch.setattr(build, "_made", lambda *_: (_ for _ in ()).throw(ImportError("no eyes")))
    with pytest.raises(ModelError, match="no eyes"):
        build._build(make_config({"model_type": "gemma3_text", **TEXT}), torch.bfloat16)


def test_what_travels_beside_the_hidden_state_is_counted_until_it_has_been_read():
    fields = {
        "model_type": "gemma4_text",
        **TEXT,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 4,
    }
    model, _ = build._build(make_config(fields), torch.bfloat16)
    with Answering():
        split = build._take_apart(model)
        run = build._Run(split, chain_of(split), torch.bfloat16, None)
    hidden, each = 32 * 2, 8 * 2
    found = [run.boundaries.amount(layer) for layer in range(6)]
    assert [amount.per_token for amount in found] == [
        0,
        *(hidden + each * left for left in (4, 3, 2, 1)),
        hidden,
    ]
    assert not any(amount.fixed or amount.per_pair for amount in found)
    assert run.boundaries.at(3, 100).hidden.shape == (1, 100, 32)
