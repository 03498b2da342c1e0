"""A recompute repeats its forward: choices near ties, branches, late draws, what users save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.engine.layer_run import Known, LayerRuns
from roundpipe.engine.random import layer_seed
from roundpipe.errors import ModelError, StepError

SEED = 7
EACH = roundpipe.ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)],
    bwd_plan=[range(4, 5), range(3, 4), range(1, 3), range(1)],  # one stage lies in two of forward
)
GRAINS = [None, "layer"]


class Router(nn.Module):
    """Two experts of four for each row. Experts come in pairs that every row likes as much."""

    def __init__(self, width=8, *, nudge=0.0):
        super().__init__()
        self.gate = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.nudge = nudge

    def forward(self, x):
        logits = self.gate(x).repeat_interleave(2, dim=1)
        if doing_recompute():  # as arithmetic that is a little off would
            logits = logits + self.nudge * torch.tensor([0.0, 3.0, 1.0, 4.0])
        weights, chosen = logits.softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            out = out.index_add(0, row, expert(x[row]) * weights[row, place, None])
        return x + out


class Branch(nn.Module):
    """Goes one of two ways, by a number that is nearly zero."""

    def __init__(self, width=8, *, nudge=0.0):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.nudge = nudge

    def forward(self, x):
        nearly_zero = (x - x).sum() - 1e-7 + self.nudge * doing_recompute()
        return x + torch.tanh(self.ways[int(bool(nearly_zero > 0))](x))


def model_of(make, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = [make(**more) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 4)).train()


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("make", [Router, Branch])
def test_gradients_are_those_of_what_forward_chose(
    make, num_devices, grain, batches, plain, wrap, train_xy, square_loss, close_to
):
    batch = batches.points(9)
    reference = plain(model_of(make), square_loss)
    wrapped = wrap(model_of(make, nudge=1e-6), num_devices)
    for _ in range(2):
        loss = reference.forward_backward(batch, 3)

        found = train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH, recompute_grain=grain)

        assert torch.equal(found, loss)
        close_to(wrapped.gradients(), reference.gradients(), 2e-5)  # of the nudge
        wrapped.zero_grad()


def test_without_a_replay_they_would_be_others(
    batches, plain, wrap, train_xy, square_loss, close_to, monkeypatch
):
    monkeypatch.setattr(LayerRuns, "_kept", lambda *_: {})
    batch = batches.points(9)
    reference = plain(model_of(Router), square_loss)
    wrapped = wrap(model_of(Router, nudge=1e-6), 1)
    reference.forward_backward(batch, 3)
    train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH)
    with pytest.raises(AssertionError):
        close_to(wrapped.gradients(), reference.gradients(), 2e-5)


def test_forward_under_autograd_is_repeated_too_and_twice_if_asked(
    batches, plain, wrap, split_in, square_loss, close_to
):
    batch = batches.points(9)
    reference = plain(model_of(Router), square_loss)
    wrapped = wrap(model_of(Router, nudge=1e-6), 2)
    reference.forward_backward(batch, 3)
    output = wrapped(batch["x"], roundpipe_run_config=split_in(3, execute_plan=EACH))
    loss = square_loss(output, batch["y"])
    loss.backward(retain_graph=True)
    expected = reference.gradients()
    close_to(wrapped.gradients(), expected, 2e-5)
    loss.backward()
    close_to(wrapped.gradients(), {name: 2 * g for name, g in expected.items()}, 2e-5)


def test_nothing_is_kept_where_nothing_chooses_or_recomputes(
    batches, tiny_tower, wrap, train_xy, square_loss
):
    wrapped = wrap(tiny_tower(), 2)
    router = wrap(model_of(Router), 2)
    seen = []
    for each in (wrapped, router):
        put = each._engine.models[0].leaving_kept.__class__
        assert put is dict
        for model in each._engine.models:
            model.leaving_kept = _Noticing(seen, each)
    train_xy(wrapped, batches.points(6), square_loss, 3)
    with torch.no_grad():
        router(batches.points(6)["x"])
    assert seen == []
    train_xy(router, batches.points(6), square_loss, 3, execute_plan=EACH)
    assert set(seen) == {router}
    router.synchronize()
    assert router._chain.making.runs[-1].kept.held == {}


class _Noticing(dict):
    def __init__(self, seen, who):
        super().__init__()
        self.seen, self.who = seen, who

    def __setitem__(self, key, value):
        self.seen.append(self.who)
        super().__setitem__(key, value)


# ---- what users save


class Saves(nn.Module):
    """Chooses rows itself, several times if it is asked, and says so."""

    def __init__(self, width=8, *, times=1, reads=None):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.times, self.reads = times, times if reads is None else reads
        self.calls = []

    def forward(self, x):
        self.calls.append(doing_recompute())
        for time in range(self.reads if doing_recompute() else self.times):
            if doing_recompute():
                rows, by = get_recompute_data()
                assert by == {"by": time}
            else:
                rows = torch.nonzero(x.sum(1) > time / 4).flatten()
                save_for_recompute(rows, {"by": time})
            x = x.index_add(0, rows, torch.tanh(self.linear(x[rows])))
        return x


def unwrapped_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("times", [1, 3])
def test_what_a_layer_saves_comes_back_in_its_recompute(
    times, grain, batches, plain, wrap, train_xy, square_loss, same_bits
):
    batch = batches.points(9)
    reference = plain(model_of(Saves, times=times), square_loss)
    wrapped = wrap(model_of(Saves, times=times), 2)
    loss = reference.forward_backward(batch, 3)
    assert not any(doing for module in reference.model[1:4] for doing in module.calls)

    found = train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH, recompute_grain=grain)

    assert torch.equal(found, loss)
    same_bits(wrapped.gradients(), reference.gradients())


def test_more_may_not_be_read_than_was_saved(batches, wrap, train_xy, square_loss):
    wrapped = wrap(model_of(Saves, times=2, reads=3), 2)

    def train():
        train_xy(wrapped, batches.points(6), square_loss, 2, execute_plan=EACH)
        wrapped.synchronize()  # in whichever of them it is told

    with pytest.raises(StepError, match="forward has saved no more than was read: 2"):
        train()


def test_in_the_last_stage_and_in_plain_pytorch_nothing_is_saved(
    batches, wrap, train_xy, square_loss
):
    wrapped = wrap(model_of(Saves), 1)
    whole = roundpipe.ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)])
    train_xy(wrapped, batches.points(6), square_loss, 2, execute_plan=whole)
    save_for_recompute(torch.ones(2))
    assert not doing_recompute()
    with pytest.raises(ModelError, match="outside of a recompute"):
        get_recompute_data()


class SavesWrong(nn.Module):
    def __init__(self, width=8, *, what="wants a gradient"):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.what = what

    def forward(self, x):
        x = self.linear(x)
        if self.what == "wants a gradient":
            with torch.enable_grad():
                save_for_recompute(self.linear(x))
        else:
            save_for_recompute(x)
            x = x.add_(1)
        return x


@pytest.mark.parametrize("what", ["wants a gradient", "was written to after"])
def test_what_cannot_be_saved_is_refused(what, batches, wrap, train_xy, square_loss):
    wrapped = wrap(model_of(SavesWrong, what=what), 1)
    with pytest.raises(StepError, match=what):
        train_xy(wrapped, batches.points(6), square_loss, 2, execute_plan=EACH)


def test_a_parameter_that_is_saved_is_copied_out_of_its_slot(
    batches, plain, wrap, train_xy, square_loss, same_bits
):
    class SavesWeight(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            if doing_recompute():
                (weight,) = get_recompute_data()
                assert torch.equal(weight, self.linear.weight)
            else:
                save_for_recompute(self.linear.weight.detach())
            return torch.tanh(self.linear(x))

    batch = batches.points(9)
    reference = plain(model_of(SavesWeight), square_loss)
    wrapped = wrap(model_of(SavesWeight), 1)
    reference.forward_backward(batch, 3)
    train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH)
    same_bits(wrapped.gradients(), reference.gradients())


# ---- draws that begin late


class DrawsLate(nn.Module):
    """Drops only where the input is large, which the first microbatch's is not."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        if x.shape[0] < 3:
            x = nn.functional.dropout(x, 0.4)
        if x.shape[0] == 1:
            x = nn.functional.rrelu(x, training=True)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_layer_that_draws_only_later_draws_what_is_its_own(
    num_devices, batches, plain, wrap, train_xy, square_loss, same_bits
):
    wrapped = wrap(model_of(DrawsLate), num_devices, seed=SEED)
    reference = plain(model_of(DrawsLate), square_loss)
    batch = {name: value[:7] for name, value in batches.points(7).items()}  # 3, 2 and 2 rows
    with torch.random.fork_rng(devices=[]):
        for call in range(2):
            total = None
            for microbatch, rows in enumerate((slice(3), slice(3, 5), slice(5, 7))):
                x = batch["x"][rows]
                for layer, module in enumerate(reference.model):
                    torch.manual_seed(layer_seed(SEED, call, layer, microbatch))
                    x = module(x)
                loss = square_loss(x, batch["y"][rows])
                loss.backward()
                reference.collect()
                total = loss.detach() if total is None else total + loss.detach()

            found = train_xy(wrapped, batch, square_loss, 3, execute_plan=EACH)

            assert torch.equal(found, total)
            same_bits(wrapped.gradients(), reference.gradients())
            wrapped.zero_grad()
    needs = [wrapped._engine.known.of(layer) for layer in range(5)]
    assert [need.draws for need in needs] == [False, True, True, True, False]


def test_what_a_layer_needs_is_forgotten_and_learnt_again():
    known = Known()
    assert known.of(3) is None
    known.learn(3, draws=False, chooses_in=[2])
    known.learn(3, draws=True, chooses_in=[5])
    assert known.of(3).draws
    assert known.of(3).chooses_in == {2, 5}
    known.forget()
    assert known.of(3) is None
