"""What is counted of a last layer whose loss is made in chunks of tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from roundpipe.models import chunked_loss
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.estimate import build
from roundpipe.models.estimate.adapter import apply_method
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.costs import Job, costs
from roundpipe.models.estimate.layer_run import Given, run_layer
from roundpipe.models.estimate.method import Lora, Method
from roundpipe.models.estimate.profile import Profile
from roundpipe.models.spec import Inputs
from roundpipe.plan.cards import card_named

WORDS, WIDTH, ROWS = 640, 64, 32
FIELDS = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 32 tokens, for more logits than those of 50 tokens."""
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 50 * WORDS * 4)
    monkeypatch.setattr(chunked_loss, "TRAINED_ROWS", ROWS)
    monkeypatch.setattr(chunked_loss, "FROZEN_ROWS", ROWS)
    monkeypatch.setattr(chunked_loss, "_TILE", ROWS)
    monkeypatch.setattr(build, "TRAINED_ROWS", ROWS)


def profile_of(name):
    return count(make_config(FIELDS), Method(name=name, lora=Lora(r=4)), name="small", bits=32)


def with_data(name, tokens):
    """The last layer's counts with weights and data."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(FIELDS), dtype=torch.float32).train()
    apply_method(model, Method(name=name, lora=Lora(r=4)))
    layer = causal_lm_spec(model).layers[-1]
    shell = layer.make_shell(torch.device("cpu"))
    shell.bind(layer.tensors)
    for parameter in shell.parameters.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    inputs = Inputs((), {"input_ids": ids, "labels": ids}, wants_logits=False)
    given = Given(torch.zeros(1, tokens, WIDTH), inputs, None, torch.float32, is_last=True)
    return run_layer(layer, shell, given)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_bytes_are_those_of_a_layer_with_data(name):
    tokens = 5 * ROWS
    kind = profile_of(name).kinds(tokens)[-1].of(tokens)
    real = with_data(name, tokens)
    assert real.is_cut
    assert kind.kept.at(tokens, tokens) == real.kept
    assert kind.peak(tokens, tokens) == max(real.moments)


def test_few_tokens_are_counted_with_all_logits():
    kind = profile_of("full").kinds(512)[-1]
    assert kind.beyond is not None
    assert kind.beyond[0] == 50
    assert kind.of(50) is kind
    assert kind.of(51) is kind.beyond[1]
    assert kind.of(51).of(1000) is kind.of(51)


def test_the_arithmetic_is_the_same_and_memory_does_not_grow_with_logits():
    whole = profile_of("full").kinds(512)[-1]
    cut = whole.of(4096)

    def flops(kind):
        runs = (kind.forward, kind.backward)
        return sum(w.flops.at(4096, 4096) for run in runs for w in run.works.values())

    assert flops(cut) == flops(whole)
    grows = [(kind.kept.per_token, max(p.per_token for p in kind.peaks)) for kind in (whole, cut)]
    assert grows[0][0] >= 4 * WORDS
    assert sum(grows[1]) < 4 * WORDS
    assert sum(grows[1]) <= 6 * 4 * WIDTH  # some hidden states


def test_it_survives_being_stored():
    profile = profile_of("lora")
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.regimes[-1].kinds[-1].beyond


def test_costs_go_by_the_tokens_of_a_microbatch():
    profile, card = profile_of("full"), card_named("4090").at_work()
    few, many, more = (
        costs(profile, card, Job(dtype="fp32", length=50, microbatch_size=size)).layers[-1]
        for size in (1, 64, 128)
    )
    assert few.activation_bytes >= 50 * WORDS * 4
    assert more.peak_bytes - many.peak_bytes <= 64 * 50 * 6 * 4 * WIDTH
    assert many.peak_bytes < 64 * 50 * WORDS
