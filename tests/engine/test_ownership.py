"""Tensors that cross streams are held for the stream that uses them: see [Note: who owns a tensor].

Only a card's allocator would notice a hold that is missing, and only sometimes. So it is looked at
what is copied and what is held.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import roundpipe
from roundpipe.engine.device_model import DeviceModel
from roundpipe.engine.staging import Staging


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def seen(monkeypatch):
    """What came up, what went down, and what was held for which stream; kept, so ids are theirs."""
    seen = {"up": [], "down": [], "compute": [], "activations_down": []}
    bring_up, bring_down = Staging.bring_up, Staging.bring_down

    def up(self, tree, sizes):
        moved = bring_up(self, tree, sizes)
        seen["up"] += tensors(moved)
        return moved

    def down(self, tree, sizes):
        held = {id(tensor) for tensor in seen["activations_down"]}
        assert held.issuperset(map(id, tensors(tree)))
        seen["down"] += tensors(tree)
        return bring_down(self, tree, sizes)

    monkeypatch.setattr(Staging, "bring_up", up)
    monkeypatch.setattr(Staging, "bring_down", down)
    monkeypatch.setattr(
        DeviceModel, "hold", lambda _, stream, tree: seen[stream].extend(tensors(tree))
    )
    return seen


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_what_a_step_brings_up_is_held_for_compute_and_what_it_brings_down_for_that(seen, grain):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    x = torch.randn(6, 4)
    config = roundpipe.RoundPipeRunConfig(recompute_grain=grain, num_microbatch=3)
    with roundpipe.RoundPipe(model, devices="cpu*3") as ours:
        ours.forward_backward((x,), label=x, loss_fn=mse_loss, run_config=config)
        ours.step(roundpipe.optim.SGD(ours.optim_parameters()))
        given = x.clone().requires_grad_()
        ours(given, roundpipe_run_config=config).square().sum().backward()
        ours.synchronize()
    held = {id(tensor) for tensor in seen["compute"]}
    assert seen["up"]
    assert seen["down"]
    assert held.issuperset(map(id, seen["up"]))
