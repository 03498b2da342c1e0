"""A layer's first run is watched; later ones run under a mode only if they need one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import RoundPipeRunConfig
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
