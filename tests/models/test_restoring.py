"""Rotary tables that a forward changes: every call begins with the same ones."""

from __future__ import annotations

import pytest
import torch

from roundpipe.models.causal_lm import causal_lm_spec

ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}


def make(tiny, rope):
    kind, length = ("phi3", 64) if rope == "longrope" else ("llama", 16)
    more = {"original_max_position_embeddings": 16} if rope == "longrope" else {}
    return tiny.make(kind, max_position_embeddings=length, rope_parameters=ROPES[rope], **more)


def loss_of(output):
    return output.loss


@pytest.mark.parametrize("rope", ROPES)
def test_each_call_is_that_of_a_model_just_made_whatever_came_before(rope, tiny, chain_of, plain):
    microbatches = tiny.inputs((12, 24, 20, 12))  # 20 would fit a table for 24
    chain = chain_of(causal_lm_spec(make(tiny, rope)))
    for inputs in microbatches:
        chain.grads = {}
        fresh = make(tiny, rope)
        losses, grads = plain(fresh, [inputs], loss_of)
        assert torch.equal(chain.forward_backward(inputs, loss_of), losses[0])
        assert all(torch.equal(chain.grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("rope", ROPES)
def test_the_tables_make_a_difference_beyond_the_length(rope, tiny):
    """Else the test before proves nothing."""
    inputs = tiny.inputs((24,))[0].kwargs
    model = make(tiny, rope)
    before = model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(**inputs, use_cache=False)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)


def test_the_users_tables_stay_as_they_are(tiny, chain_of):
    model = make(tiny, "longrope")
    rotary = model.model.rotary_emb
    before, names = rotary.inv_freq.clone(), set(vars(rotary))
    chain_of(causal_lm_spec(model)).forward(tiny.inputs((24,))[0])
    assert torch.equal(rotary.inv_freq, before)
    assert set(vars(rotary)) == names


def test_only_what_every_forward_writes_to_is_copied(tiny):
    names = {home.name for home in causal_lm_spec(make(tiny, "longrope")).split.rewritten}
    assert names == {"model.rotary_emb.inv_freq"}
    assert not causal_lm_spec(tiny.make("llama")).split.rewritten
