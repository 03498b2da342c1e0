"""Layers may write to their input wherever stages are cut: what is saved of it stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, StepError


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
            nn.Linear(8, 8),
            Doubling(),
            nn.Identity(),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8),
            Doubling(),
            nn.Linear(8, 4),
        )
    for layer in range(frozen):
        model[layer].requires_grad_(False)
    return model


def stages(*cuts):
    return [range(start, stop) for start, stop in cuts]


FORWARD = stages((0, 2), (2, 6))
PLANS = {  # frozen layers, and backward stages that begin with layers that write
    "a stage a layer": (0, stages((6, 7), (5, 6), (4, 5), (3, 4), (2, 3), (1, 2), (0, 1))),
    "few stages": (0, stages((6, 7), (3, 6), (1, 3), (0, 1))),
    "the lowest trained layer writes": (5, stages((6, 7), (5, 6))),
    "two of the trained layers write": (1, stages((6, 7), (3, 6), (1, 3))),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_layer_that_writes_to_its_input_gives_the_plain_bits(
    grain, plan, batches, square_loss, plain, wrap, train_xy, same_bits
):
    frozen, backward = PLANS[plan]
    batch = batches.points(4)
    reference = plain(writing(frozen=frozen), square_loss)
    expected = reference.forward_backward(batch, 2)
    gradients = reference.gradients()
    wrapped = wrap(writing(frozen=frozen), 2)
    by_hand = ModelExecutePlan(FORWARD, backward)
    for _ in range(2):  # that they write is learned in the first
        found = train_xy(
            wrapped, batch, square_loss, 2, recompute_grain=grain, execute_plan=by_hand
        )
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


class Sometimes(Doubling):
    """Writes to its input in training, or when its first number is large."""

    def __init__(self, *, by_value):
        super().__init__()
        self.by_value = by_value

    def forward(self, x):
        writes = bool(x[0, 0] > 0) if self.by_value else self.training
        return super().forward(x) if writes else self.inner(x)


def sometimes(*, by_value):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), Sometimes(by_value=by_value), nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(*layers)


def test_a_layer_that_writes_in_training_alone_may_run_in_evaluation_first(
    batches, square_loss, plain, wrap, train_xy, same_bits
):
    batch = batches.points(4)
    reference = plain(sometimes(by_value=False), square_loss)
    expected = reference.forward_backward(batch, 2)
    wrapped = wrap(sometimes(by_value=False), 2)
    wrapped.eval()
    with torch.no_grad():
        wrapped(batch["x"])
    wrapped.train()
    by_hand = ModelExecutePlan(stages((0, 3)), stages((3, 4), (2, 3), (1, 2), (0, 1)))
    found = train_xy(wrapped, batch, square_loss, 2, execute_plan=by_hand)
    assert torch.equal(found, expected)
    same_bits(wrapped.gradients(), reference.gradients())


def test_a_layer_that_begins_to_write_to_its_input_is_an_error(wrap, square_loss, train_xy):
    wrapped = wrap(nn.Sequential(nn.Identity(), *sometimes(by_value=True)[1:]), 1)
    by_hand = ModelExecutePlan(stages((0, 3)), stages((3, 4), (0, 3)))
    few = {"x": -torch.ones(4, 8), "y": torch.zeros(4, 4)}
    train_xy(wrapped, few, square_loss, 2, execute_plan=by_hand)
    with pytest.raises(StepError, match="writes to its input, and did not when"):
        train_xy(wrapped, few | {"x": torch.ones(4, 8)}, square_loss, 2, execute_plan=by_hand)
    train_xy(wrapped, few, square_loss, 2, execute_plan=by_hand)
