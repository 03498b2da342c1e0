"""Models that also see are trained on text: as plain torch would, and on nothing but text."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import multimodal_cases as cases
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.choose import spec_for
from roundpipe.models.text_only import TextOnly, other_parts

_FEW = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}


def _plain_gradients(model, batch, num_microbatch):
    """Loss and gradients of an ordinary loop over the same microbatches."""
    count = (batch["labels"][:, 1:] != -100).sum()
    model.train()
    total = torch.zeros(())
    for rows in torch.arange(len(batch["labels"])).chunk(num_microbatch):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        loss = model(**part, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "kind",
    [
        "gemma4",
        "qwen2_vl",
        "large_tower",
        pytest.param("llama4", marks=pytest.mark.accept),
        *[pytest.param(k, marks=pytest.mark.accept) for k in ("gemma3", "qwen3_vl")],
        *[pytest.param(k, marks=pytest.mark.accept) for k in ("qwen3_vl_moe", "mistral3")],
    ],
)
def test_loss_and_gradients_are_those_of_plain_torch_and_the_tower_is_left_alone(kind):
    model, batch = cases.model(kind), cases.batch()
    loss, gradients = _plain_gradients(copy.deepcopy(model), batch, 2)
    tower = {n for n, _ in model.named_parameters() if n not in gradients}
    model.train()
    with RoundPipe(model, devices="cpu*2") as trainer:
        config = RoundPipeRunConfig(num_microbatch=2)
        ours = trainer.forward_backward(input_kwargs=batch, run_config=config)
        found = trainer.gradients()
        assert torch.equal(ours, loss)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():  # a tied embedding sums in another order
            assert torch.allclose(gradient, gradients[name], atol=1e-6), name
        assert tower
        assert all(n.startswith(tuple(f"{part}." for part in other_parts(model))) for n in tower)
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == tower
        masters = {name for name, _ in trainer.optim_named_parameters()}
        assert not masters & tower
        assert tower <= trainer.state_dict().keys()


def test_a_model_of_text_alone_has_nothing_beside_its_decoder():
    assert other_parts(LlamaForCausalLM(LlamaConfig(**_FEW, num_attention_heads=2))) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3", "pixel_values"),
        ("qwen2_vl", "image_grid_thw"),
        ("qwen2_vl", "pixel_values_videos"),
        ("llama4", "mm_encoder_outputs"),
    ],
)
def test_a_sample_with_an_image_is_refused_by_the_argument_s_name(kind, name):
    text = TextOnly(cases.model(kind))
    with pytest.raises(ConfigError, match=f"{name} is given\nhint: drop the samples"):
        text.check((), {**cases.batch(), name: torch.ones(1)})
    text.check((), {**cases.batch(), name: None, "token_type_ids": torch.zeros(4, 10)})


@pytest.mark.parametrize("by_position", [True, False])
def test_tokens_that_stand_for_an_image_are_refused(by_position):
    text = TextOnly(cases.model("qwen2_vl"))
    ids = cases.batch()["input_ids"]
    ids[2, 5] = 91
    given = ((ids,), {}) if by_position else ((), {"input_ids": ids})
    with pytest.raises(ConfigError, match="input_ids hold video_token_id: 91"):
        text.check(*given)


def test_a_call_with_an_image_is_refused_where_it_comes_in():
    with RoundPipe(cases.model("gemma3"), devices="cpu") as trainer:
        batch = {**cases.batch(), "pixel_values": torch.ones(1, 3, 16, 16)}
        with pytest.raises(ConfigError, match="pixel_values is given"):
            trainer.forward_backward(input_kwargs=batch)
        with pytest.raises(ConfigError, match="pixel_values is given"):
            trainer(**batch)


def test_any_other_module_may_take_whatever_it_likes():
    TextOnly(None).check((), {"pixel_values": 1})


def test_an_encoder_with_a_decoder_is_refused_by_name():
    few = {f"{half}_{what}": 1 for half in ("encoder", "decoder") for what in ("layers",)}
    heads = {f"{half}_attention_heads": 1 for half in ("encoder", "decoder")}
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 16}
    model = BartForConditionalGeneration(BartConfig(**few, **heads, **sizes))
    with pytest.raises(ModelError, match="not one chain: BartForConditionalGeneration\nhint: "):
        spec_for(model)


def test_a_model_without_a_head_is_one_layer_and_says_so(caplog):
    spec = spec_for(LlamaModel(LlamaConfig(**_FEW, num_attention_heads=2)))
    assert len(spec.layers) == 1
    assert "LlamaModel has no head that makes text and runs as one layer" in caplog.text


def test_a_compiled_module_is_refused_with_the_way_out():
    compiled = torch.nn.Module()  # to compile one takes seconds of imports
    compiled._orig_mod = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"torch\.compile .*: Linear\nhint: .*_orig_mod"):
        spec_for(compiled)
