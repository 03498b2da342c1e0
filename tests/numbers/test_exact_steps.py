"""Exact mode: ten steps equal those of a plain loop over the same microbatches, bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import roundpipe
from roundpipe import ModelExecutePlan
from roundpipe.errors import PlanError

PLAIN_ADAMW = {"foreach": False, "fused": False}


class Unknown(torch.optim.NAdam):
    """An optimizer that steps as a whole, as anything not known does."""


def half(step):
    return 0.5**step


OPTIMIZERS = {
    "AdamW": (roundpipe.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "torch AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, **PLAIN_ADAMW}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "unknown": (Unknown, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}
SCHEDULERS = {
    "none": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "halving": lambda optimizer: LambdaLR(optimizer, half),
    "one cycle, of betas too": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=12),
}


def pair(kind, reference, wrapped):
    """The same optimizer over a plain model's parameters and over masters; plain AdamW for ours."""
    make, settings = OPTIMIZERS[kind]
    theirs = make(wrapped.optim_parameters(), **settings)
    if make is roundpipe.optim.AdamW:
        make, settings = torch.optim.AdamW, {**settings, **PLAIN_ADAMW}
    return make(reference.parameters(), **settings), theirs


CASES = [
    ("AdamW", "none", 1),
    ("AdamW", "cosine", 2),
    ("AdamW", "one cycle, of betas too", 3),
    ("torch AdamW", "halving", 2),
    ("SGD with momentum", "cosine", 3),
    ("NAdam", "cosine", 3),
    ("unknown", "cosine", 3),
    ("Adafactor", "halving", 2),
]


@pytest.mark.parametrize(("kind", "schedule", "num_devices"), CASES)
def test_ten_steps_of_a_causal_lm_equal_a_plain_loop(
    kind, schedule, num_devices, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    reference, wrapped = plain(tiny_llama(layers=3)), wrap(tiny_llama(layers=3), num_devices)
    plain_optimizer, optimizer = pair(kind, reference.model, wrapped)
    plain_rate, rate = SCHEDULERS[schedule](plain_optimizer), SCHEDULERS[schedule](optimizer)
    expected, found, norms = [], [], []
    for seed in range(10):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected.append(reference.forward_backward(batch, 4).item())
        norms.append(reference.step(plain_optimizer, 1.0))
        plain_rate.step()

    results = []
    for seed in range(10):  # nothing is waited for but the losses
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        found.append(train_lm(wrapped, batch, 4).item())
        results.append(wrapped.step(optimizer, max_grad_norm=1.0))
        rate.step()

    assert found == expected
    assert [r.grad_norm.item() for r in results] == [n.item() for n in norms]
    same_bits(wrapped.state_dict(), reference.model.state_dict())
    assert rate.get_last_lr() == plain_rate.get_last_lr()


def test_moments_can_be_exchanged_with_torchs_adamw(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """Five steps here, the rest in plain PyTorch with our optimizer's state_dict, or all there."""
    reference = plain(tiny_tower(), square_loss)
    plain_adamw = torch.optim.AdamW(reference.model.parameters(), lr=1e-2, **PLAIN_ADAMW)
    model = tiny_tower()
    wrapped = wrap(model, 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    for seed in range(5):
        reference.forward_backward(batches.points(6, seed=seed), 3)
        reference.step(plain_adamw)
        train_xy(wrapped, batches.points(6, seed=seed), square_loss, 3)
        wrapped.step(adamw)
    wrapped.synchronize()
    state = adamw.state_dict()
    wrapped.close()
    continued = plain(model, square_loss)
    continued_adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, **PLAIN_ADAMW)
    continued_adamw.load_state_dict(state)

    for seed in range(5, 8):
        for each, optimizer in ((reference, plain_adamw), (continued, continued_adamw)):
            each.forward_backward(batches.points(6, seed=seed), 3)
            each.step(optimizer)

    same_bits(model.state_dict(), reference.model.state_dict())


PLANS = [
    ModelExecutePlan([range(5)], [range(5, 6), range(5)]),
    ModelExecutePlan([range(2), range(2, 5)], [range(5, 6), range(3, 5), range(1, 3), range(1)]),
    ModelExecutePlan([], [range(6)]),
    ModelExecutePlan([range(3)], [range(3, 6), range(2, 3), range(2)]),
]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_stages_given_by_hand_and_both_grains_of_recompute_give_the_same_bits(
    num_devices, grain, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(tiny_tower(), square_loss)
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=1e-3)
    wrapped = wrap(tiny_tower(), num_devices)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-3)
    for seed, plan in enumerate([PLANS[0], PLANS[0], *PLANS[1:]]):
        batch = batches.points(6, seed=seed)
        expected = reference.forward_backward(batch, 3)
        reference.step(plain_sgd)

        found = train_xy(wrapped, batch, square_loss, 3, execute_plan=plan, recompute_grain=grain)
        wrapped.step(sgd)

        assert torch.equal(found, expected)
        assert wrapped.plan.partition.fused == plan.bwd_plan[0]
        assert list(wrapped.plan.partition.forward) == plan.fwd_plan
    same_bits(wrapped.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize(
    ("forward", "backward", "match"),
    [
        ([range(3)], [range(3, 6)], "reach down to the lowest trained layer, 1"),
        ([range(3)], [range(3, 6), range(2, 3)], "reach down to the lowest trained layer, 1"),
        ([range(3)], [range(3, 5), range(3)], "end with the last of 6 layers"),
        ([range(3)], [range(3, 7), range(3)], "end with the last of 6 layers"),
        ([range(3)], [range(3, 6, 2), range(3)], "end with the last of 6 layers"),
        ([range(2)], [range(3, 6), range(3)], "forward stages must cover layers 0 to 3"),
        ([range(3)], [range(3, 6), range(2)], "backward stages must cover layers down from 3"),
    ],
)
def test_stages_given_by_hand_that_miss_a_layer_are_refused(
    forward, backward, match, batches, tiny_tower, square_loss, wrap, train_xy
):
    model = tiny_tower()
    model[0].requires_grad_(False)
    wrapped = wrap(model, 2)
    plan = ModelExecutePlan(forward, backward)
    with pytest.raises(PlanError, match=match):
        train_xy(wrapped, batches.points(4), square_loss, 2, execute_plan=plan)
    plan = ModelExecutePlan([range(3)], [range(3, 6), range(1, 3)])  # as far as anything is trained
    train_xy(wrapped, batches.points(4), square_loss, 2, execute_plan=plan)
    assert "1.up.weight" in wrapped.gradients()


def test_the_number_of_devices_and_new_plans_change_no_bit(
    batches, tiny_llama, wrap, train_lm, same_bits
):
    states, losses = [], []
    for num_devices in (1, 2, 5):
        wrapped = wrap(tiny_llama(tied=True, layers=3), num_devices)
        adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
        found = []
        for seed in range(4):
            batch = batches.sequences([9, 14, 5, 7], seed=seed)
            found.append(train_lm(wrapped, batch).item())  # the split is planned too
            wrapped.step(adamw, max_grad_norm=1.0)
        states.append(wrapped.state_dict())
        losses.append(found)
    assert losses.count(losses[0]) == 3
    for state in states[1:]:
        same_bits(state, states[0])


def test_a_hybrid_schedule_is_close_and_repeats_its_bits(
    batches, tiny_llama, plain, wrap, train_lm, same_bits, close_to
):
    """To 1e-6: a stage on several devices adds up in another order."""
    batch = batches.sequences([9, 14, 5, 7, 12, 3])
    reference = plain(tiny_llama())
    expected = reference.forward_backward(batch, 6)
    runs = []
    for _ in range(2):
        wrapped = wrap(tiny_llama(), 3, schedule="hybrid")
        found = train_lm(wrapped, batch, 6)
        gradients = {n: g.clone() for n, g in wrapped.gradients().items()}
        runs.append((found, gradients, wrapped.plan.replicas))
    assert max(runs[0][2].forward, runs[0][2].fused, runs[0][2].backward) > 1
    assert torch.equal(runs[0][0], runs[1][0])
    same_bits(runs[0][1], runs[1][1])
    assert runs[0][0].item() == pytest.approx(expected.item(), rel=1e-6)
    close_to(runs[0][1], reference.sums, 2e-6)


def test_a_function_that_steps_equals_the_optimizer(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    plain_adam = torch.optim.Adam(reference.model.parameters(), lr=1e-2)
    adam = torch.optim.Adam(wrapped.optim_parameters(), lr=1e-2)

    def function():
        for parameter in wrapped.optim_parameters():
            parameter.grad.clamp_(-0.5, 0.5)  # what no optimizer of ours does
        adam.step()

    for seed in range(4):
        batch = batches.points(6, seed=seed)
        expected = reference.forward_backward(batch, 3)
        reference.sums = {n: g.clamp(-0.5, 0.5) for n, g in reference.sums.items()}
        reference.step(plain_adam)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        wrapped.step(function)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_two_optimizers_may_take_turns(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    first, second = (
        pair("AdamW", reference.model, wrapped),
        pair("SGD with momentum", reference.model, wrapped),
    )
    for seed in range(5):
        batch = batches.points(6, seed=seed)
        theirs, ours = (first, second)[seed % 2]
        expected = reference.forward_backward(batch, 3)
        reference.step(theirs)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        wrapped.step(ours)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_an_optimizer_of_some_parameters_leaves_the_others(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    def biases(named):
        return [p for name, p in named if name.endswith("bias")]

    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    plain_sgd = torch.optim.SGD(biases(reference.model.named_parameters()), lr=1e-2)
    sgd = torch.optim.SGD(biases(wrapped.optim_named_parameters()), lr=1e-2)
    for seed in range(3):
        batch = batches.points(6, seed=seed)
        expected = reference.forward_backward(batch, 3)
        norm = reference.step(plain_sgd, 1.0)  # of all gradients, as clip_grad_norm_ takes it
        reference.model.zero_grad()
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        assert torch.equal(wrapped.step(sgd, max_grad_norm=1.0).grad_norm, norm)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_weights_loaded_between_steps_are_trained_on(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    plain_adamw, adamw = pair("AdamW", reference.model, wrapped)
    start = {n: t.clone() for n, t in reference.model.state_dict().items()}
    for seed in range(4):
        batch = batches.points(6, seed=seed)
        expected = reference.forward_backward(batch, 3)
        reference.step(plain_adamw)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        wrapped.step(adamw)
        if seed == 1:
            reference.model.load_state_dict(start)
            wrapped.load_state_dict(start)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_schedulers_do_not_warn(batches, tiny_tower, square_loss, wrap, train_xy):
    wrapped = wrap(tiny_tower(), 2)
    for make in (torch.optim.SGD, roundpipe.optim.AdamW):
        optimizer = make(wrapped.optim_parameters(), lr=1e-2)
        rate = LambdaLR(optimizer, half)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_xy(wrapped, batches.points(4), square_loss, 2)
            wrapped.step(optimizer)
            rate.step()
