"""Buffers that change in forward end as in a plain loop over the same microbatches, in order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import roundpipe
from roundpipe.errors import StepError

EACH = roundpipe.ModelExecutePlan(
    fwd_plan=[range(i, i + 1) for i in range(4)],
    bwd_plan=[range(i, i + 1) for i in reversed(range(5))],
)
PLANS = {
    "planned": {},
    "recompute by layer": {"execute_plan": EACH, "recompute_grain": "layer"},
    "no recompute": {
        "execute_plan": roundpipe.ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)]),
    },
}


class Averaging(nn.Module):
    """Subtracts an average of what came before: what it returns depends on its buffer."""

    def __init__(self, width, *, in_place=True):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x):
        before = self.average.clone()
        if self.training:
            now = 0.9 * self.average + 0.1 * x.detach().mean(0)
            if self.in_place:
                self.average.copy_(now)
            else:
                self.average = now
        return x + torch.tanh(self.linear(x - before))


class Late(nn.Module):
    """Begins to count at its second call with a large input."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training and x[0, 0] > 0:
            self.count += 1
        return torch.tanh(self.linear(x)) * (1 + self.count)


LAYERS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()),
    "batch norm, cumulative": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "an average in place": lambda: Averaging(8),
    "an average assigned": lambda: Averaging(8, in_place=False),
    "a count that begins late": lambda: Late(8),
}


def model_of(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = [LAYERS[kind]() for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 4)).train()


def buffers(state):
    return {
        name: value.clone()
        for name, value in state.items()
        if name.rpartition(".")[2]
        in ("running_mean", "running_var", "num_batches_tracked", "_u", "_v", "average", "count")
    }


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_buffers_losses_and_gradients_equal_a_plain_loop(
    kind, num_devices, batches, plain, wrap, train_xy, square_loss, same_bits
):
    reference = plain(model_of(kind), square_loss)
    wrapped = wrap(model_of(kind), num_devices)
    for call in range(2):
        batch = batches.points(7, seed=call)
        loss = reference.forward_backward(batch, 3)

        found = train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH)

        assert torch.equal(found, loss)
        same_bits(wrapped.gradients(), reference.gradients())
        wrapped.zero_grad()
        same_bits(buffers(wrapped.state_dict()), buffers(reference.model.state_dict()))
    assert buffers(reference.model.state_dict())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["batch norm", "spectral norm", "an average in place"])
def test_a_recompute_begins_with_what_its_forward_began_with_and_does_not_count(
    kind, plan, batches, plain, wrap, train_xy, square_loss, same_bits
):
    reference = plain(model_of(kind), square_loss)
    wrapped = wrap(model_of(kind), 2)
    batch = batches.points(7)
    loss = reference.forward_backward(batch, 3)

    found = train_xy(wrapped, batch, square_loss, 3, **PLANS[plan])

    assert torch.equal(found, loss)
    same_bits(wrapped.gradients(), reference.gradients())
    same_bits(buffers(wrapped.state_dict()), buffers(reference.model.state_dict()))


@pytest.mark.parametrize("kind", ["batch norm", "an average in place", "a count that begins late"])
def test_forward_under_autograd_changes_them_once(
    kind, batches, plain, wrap, split_in, square_loss, same_bits
):
    reference = plain(model_of(kind), square_loss)
    wrapped = wrap(model_of(kind), 2)
    batch = batches.points(6)
    reference.forward_backward(batch, 3)

    output = wrapped(batch["x"], roundpipe_run_config=split_in(3, execute_plan=EACH))
    square_loss(output, batch["y"]).backward()

    same_bits(buffers(wrapped.state_dict()), buffers(reference.model.state_dict()))
    same_bits(wrapped.gradients(), reference.gradients())


def test_a_pass_without_gradient_changes_them_in_training_and_not_in_evaluation(
    batches, wrap, split_in, same_bits
):
    model = model_of("batch norm")
    reference = copy.deepcopy(model)
    wrapped = wrap(model, 2)
    pieces = [batches.points(4, seed=seed)["x"] for seed in range(2)]
    with torch.no_grad():
        for piece in pieces:
            reference(piece)
            wrapped(piece, roundpipe_run_config=split_in(1))
        same_bits(buffers(wrapped.state_dict()), buffers(reference.state_dict()))
        before = buffers(wrapped.state_dict())
        wrapped.eval()
        reference.eval()

        found = wrapped(pieces[0], roundpipe_run_config=split_in(1))

        assert torch.equal(found, reference(pieces[0]))
    same_bits(buffers(wrapped.state_dict()), before)


def test_training_steps_equal_plain_ones(batches, plain, wrap, train_xy, square_loss, same_bits):
    reference = plain(model_of("batch norm"), square_loss)
    wrapped = wrap(model_of("batch norm"), 3)
    ours = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.model.parameters(), lr=1e-2, foreach=False)
    for step in range(4):  # the third is planned anew
        batch = batches.points(9, seed=step)
        reference.forward_backward(batch, 3)
        reference.step(theirs)
        train_xy(wrapped, batch, square_loss, 3)
        wrapped.step(ours)
    same_bits(dict(wrapped.state_dict()), dict(reference.model.state_dict()))


def test_several_calls_of_one_step_go_on_from_each_other(
    batches, plain, wrap, train_xy, square_loss, same_bits, close_to
):
    reference = plain(model_of("an average in place"), square_loss)
    wrapped = wrap(model_of("an average in place"), 2)
    for seed in range(3):
        batch = batches.points(6, seed=seed)
        reference.forward_backward(batch, 2)
        train_xy(wrapped, batch, square_loss, 2)
    close_to(wrapped.gradients(), reference.gradients())  # calls are added up apart
    same_bits(buffers(wrapped.state_dict()), buffers(reference.model.state_dict()))


class Fails(nn.Module):
    def forward(self, x):
        if self.training and x.isnan().any():
            raise ValueError("not a number")
        return x


def test_a_step_that_fails_leaves_them_as_the_step_before(
    batches, wrap, train_xy, square_loss, same_bits
):
    model = model_of("batch norm").append(Fails())
    wrapped = wrap(model, 2)
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters())
    train_xy(wrapped, batches.points(6), square_loss, 3)
    wrapped.step(optimizer)
    before = buffers(wrapped.state_dict())
    good, bad = batches.points(6, seed=1), batches.points(6, seed=2)
    bad["x"][-1] = float("nan")

    train_xy(wrapped, good, square_loss, 3)  # of the same step
    with pytest.raises(StepError, match="not a number"):
        train_xy(wrapped, bad, square_loss, 3)

    same_bits(buffers(wrapped.state_dict()), before)
    train_xy(wrapped, good, square_loss, 3)
    after = buffers(wrapped.state_dict())
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_buffer_found_to_change_in_a_step_that_fails_is_as_the_step_before_left_it(
    batches, wrap, train_xy, square_loss, monkeypatch
):
    wrapped = wrap(nn.Sequential(nn.Identity(), Late(8), nn.Linear(8, 4), Fails()), 2)
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters())
    quiet, late = batches.points(6), batches.points(6, seed=1)
    quiet["x"], late["x"] = -quiet["x"].abs(), late["x"].abs()
    late["x"][-1] = float("nan")
    monkeypatch.setattr("roundpipe.engine.engine._is_over", lambda *_: False)
    train_xy(wrapped, quiet, square_loss, 3)
    wrapped.step(optimizer)  # goes on beside the next call
    with pytest.raises(StepError, match="not a number"):
        train_xy(wrapped, late, square_loss, 3)
    assert wrapped.state_dict()["1.count"] == 0


def test_a_failure_does_not_take_loaded_buffers_back(batches, wrap, train_xy, square_loss):
    wrapped = wrap(model_of("batch norm").append(Fails()), 2)
    good, bad = batches.points(6, seed=1), batches.points(6, seed=2)
    bad["x"][-1] = float("nan")
    loaded = {name: torch.ones_like(value) for name, value in wrapped.state_dict().items()}
    train_xy(wrapped, good, square_loss, 3)
    wrapped.load_state_dict(loaded)
    with pytest.raises(StepError, match="not a number"):
        train_xy(wrapped, bad, square_loss, 3)
    assert all(bool((value == 1).all()) for value in wrapped.state_dict().values())


def test_they_are_written_back_when_the_wrapper_is_closed(
    batches, plain, wrap, train_xy, square_loss, same_bits
):
    reference = plain(model_of("batch norm"), square_loss)
    model = model_of("batch norm")
    wrapped = wrap(model, 2)
    reference.forward_backward(batches.points(6), 3)
    train_xy(wrapped, batches.points(6), square_loss, 3)
    wrapped.close()
    same_bits(buffers(model.state_dict()), buffers(reference.model.state_dict()))


def test_a_schedule_that_takes_microbatches_apart_is_refused(batches, wrap, train_xy, square_loss):
    from roundpipe.plan import replicated
    from roundpipe.plan.partition import Partition

    def apart(costs, machine, microbatches):
        cut = Partition((range(4),), range(4, 5), (range(2, 4), range(2)))
        return replicated(cut, costs, devices=2, microbatches=microbatches)

    wrapped = wrap(model_of("batch norm"), 2, schedule=apart)
    with pytest.raises(
        StepError, match=r"several devices or in rounds\nhint: schedule='round_robin'"
    ):
        train_xy(wrapped, batches.points(6), square_loss, 2)


def test_a_changing_buffer_that_two_layers_read_is_refused(batches, wrap, train_xy, square_loss):
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), norm, nn.Linear(8, 4))
    wrapped = wrap(model, 1)
    with pytest.raises(StepError, match="several layers read changes in forward: 1"):
        train_xy(wrapped, batches.points(6), square_loss, 2)
