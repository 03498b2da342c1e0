"""Layers may write to their input wherever the stages are cut: what is saved of it stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan


class Doubling(nn.Module):
    """Writes to its input; twice would show, unlike with a ReLU."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2)
        return self.inner(x)


def writing(*, frozen):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 8), Doubling(), nn.Identity(), nn.ReLU(inplace=True), Doubling(),
            nn.Linear(8, 4),
        )  # fmt: skip
    for layer in range(frozen):
        model[layer].requires_grad_(False)
    return model


PLANS = [
    ModelExecutePlan([range(5)], [range(5, 6), range(4, 5), range(3, 4), range(1, 3), range(1)]),
    ModelExecutePlan([range(2), range(2, 4)], [range(4, 6), range(2, 4), range(2)]),
    ModelExecutePlan([], [range(6)]),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("frozen", [0, 1, 4])
def test_a_layer_that_writes_to_its_input_gives_the_plain_bits(
    frozen, grain, plan, batches, square_loss, plain, wrap, train_xy, same_bits
):
    cut = [stage for stage in plan.bwd_plan if stage.stop > frozen]
    if cut and cut[-1].start < frozen:
        cut[-1] = range(frozen, cut[-1].stop)
    if len(cut) == 1 and len(plan.bwd_plan) == 1:
        cut = plan.bwd_plan
    batch = batches.points(4)
    reference = plain(writing(frozen=frozen), square_loss)
    expected = reference.forward_backward(batch, 2)
    gradients = reference.gradients()
    wrapped = wrap(writing(frozen=frozen), 2)
    for _ in range(2):  # that they write is learned in the first
        found = train_xy(
            wrapped, batch, square_loss, 2, recompute_grain=grain,
            execute_plan=ModelExecutePlan(plan.fwd_plan, cut),
        )  # fmt: skip
        assert torch.equal(found, expected)
        same_bits(wrapped.gradients(), gradients)
        wrapped.zero_grad()


def test_the_callers_batch_is_not_written_to(batches, square_loss, wrap, train_xy):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = wrap(nn.Sequential(Doubling(), nn.Linear(8, 4)), 1)
    batch = batches.points(4)
    before = batch["x"].clone()
    train_xy(wrapped, batch, square_loss, 2)
    with torch.no_grad():
        wrapped(batch["x"])
    assert torch.equal(batch["x"], before)
