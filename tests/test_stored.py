"""Masters, by name and in place of the working weights where an optimizer is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe


@pytest.fixture
def wrapped():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    with roundpipe.RoundPipe(model, devices="cpu") as ours:
        yield ours


def test_inside_an_optimizer_context_parameters_are_the_masters(wrapped):
    masters = wrapped.optim_parameters()
    with roundpipe.OptimizerCtx() as context:
        with context, roundpipe.OptimizerCtx():
            pass
        inside = list(wrapped.parameters())
        named = dict(wrapped.named_parameters())
        assert next(iter(wrapped.named_parameters("a")))[0] == "a.0.weight"
    assert all(one is other for one, other in zip(inside, masters, strict=True))
    assert named.keys() == dict(wrapped.named_parameters()).keys()
    assert {p.dtype for p in inside} == {torch.float32}
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    assert roundpipe.optim.AdamW(inside).param_groups[0]["params"] == masters


def test_names_of_masters_take_a_prefix(wrapped):
    names = [name for name, _ in wrapped.optim_named_parameters("model")]
    assert names == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
