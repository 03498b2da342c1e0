"""A layer's first run is watched; later ones run under a mode only if they need one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import (
    ModelExecutePlan,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.engine import layer_run
from roundpipe.roundpipe import RoundPipe


class Chooses(nn.Module):
    def forward(self, x):
        return x * torch.softmax(x, -1).topk(1).values


@pytest.fixture
def modes(monkeypatch):
    """The layers' modes in the order in which they are made."""
    made = []

    class Noted(layer_run.DrawsFrom):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(layer_run, "DrawsFrom", Noted)
    return made


@pytest.mark.parametrize(
    ("module", "later"),
    [
        (nn.Tanh, {"train": 0, "eval": 0}),
        (lambda: nn.Dropout(0.5), {"train": 4 + 4, "eval": 0}),
        (Chooses, {"train": 4 + 4, "eval": 0}),
    ],
)
def test_only_layers_that_need_a_mode_run_under_one(module, later, modes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), module(), nn.Linear(4, 4), nn.Linear(4, 2)).train()
    config = RoundPipeRunConfig(num_microbatch=4)
    with RoundPipe(model, devices=["cpu"]) as pipe:

        def call():
            modes.clear()
            pipe.forward_backward(
                (torch.ones(4, 4),), loss_fn=lambda y, _: y.sum(), run_config=config
            )
            pipe.synchronize()
            return len(modes)

        call()
        assert call() == later["train"]
        pipe.eval()
        with torch.no_grad():
            pipe(torch.ones(4, 4), roundpipe_run_config=config)
            modes.clear()
            pipe(torch.ones(4, 4), roundpipe_run_config=config)
        assert len(modes) == later["eval"]
        pipe.train()
        assert call() == 4 + later["train"] - (1 if later["train"] else 0)  # each looked at again


def square(outputs, _):
    return outputs.square().sum()


def test_what_someone_else_draws_costs_one_more_run_and_is_not_remembered(modes, monkeypatch):
    said = iter([True])  # only runs that are not watched ask
    has_drawn = layer_run.Undrawn.has_drawn
    monkeypatch.setattr(
        layer_run.Undrawn, "has_drawn", lambda self: next(said, False) or has_drawn(self)
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with RoundPipe(model, devices=["cpu"]) as pipe:
        for _ in range(2):
            modes.clear()
            pipe.forward_backward((torch.ones(4, 4),), loss_fn=square)
            pipe.synchronize()
        assert next(said, None) is None  # it was said in the first call
        assert not modes


class Keeps(nn.Linear):
    """Hands its own weight to its recompute, and buffers that it changes."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        if doing_recompute():
            assert torch.equal(get_recompute_data()[0], self.weight)
        save_for_recompute(self.weight.detach())
        return super().forward(x) + self.count


def test_what_is_kept_lies_in_no_slot_which_others_will_be_uploaded_to(monkeypatch):
    kept, run = [], layer_run.LayerRuns.__call__

    def called(self, task, given):
        boundary, found = run(self, task, given)
        slot = self._model.weights.buffer.untyped_storage().data_ptr()
        kept.extend((t.untyped_storage().data_ptr(), slot) for t in pytree.tree_leaves(found))
        return boundary, found

    monkeypatch.setattr(layer_run.LayerRuns, "__call__", called)
    model = nn.Sequential(Keeps(), nn.Linear(4, 4), nn.Linear(4, 2))
    plan = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    with RoundPipe(model, devices=["cpu"]) as pipe:
        pipe.forward_backward((torch.ones(4, 4),), loss_fn=square, run_config=config)
        pipe.synchronize()
    assert len(kept) == 2 * 2  # a weight and a buffer of each microbatch
    assert all(place != slot for place, slot in kept)
