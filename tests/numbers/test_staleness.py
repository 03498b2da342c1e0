"""Staleness 1 equals the delayed recurrence, bit for bit, whatever happens in between.

`Delayed` is that recurrence in plain PyTorch: a call reads ``model``; a step updates the masters,
and what the next call reads is those from before the update (one step late) or after it (exact).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import roundpipe


class Delayed:
    def __init__(self, reference, make):
        self.reference, self.model = reference, reference.model
        self.masters = {
            n: nn.Parameter(p.detach().clone().to(torch.promote_types(p.dtype, torch.float32)))
            for n, p in self.model.named_parameters()
        }
        self.optimizer = make(self.masters.values())

    def step(self, *, is_async, max_norm=None):
        before = {n: m.detach().clone() for n, m in self.masters.items()}
        for name, grad in self.reference.gradients().items():
            self.masters[name].grad = grad.to(self.masters[name].dtype)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.read(before if is_async else self.masters)

    @torch.no_grad()
    def read(self, weights):
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def newest(self):
        """The newest weights in the model's dtypes: what evaluation and saving see."""
        return {n: self.masters[n].detach().to(p.dtype) for n, p in self.model.named_parameters()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=False)


def ours(parameters):
    return roundpipe.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Unknown(torch.optim.SGD):
    """An optimizer that steps as a whole, as anything not known does."""


def unknown(parameters):
    return Unknown(parameters, lr=1e-2, momentum=0.9)


MAKERS = {
    "layered": (adamw, ours),
    "by parameter": (momentum, momentum),
    "whole": (momentum, unknown),
}
LENGTHS = [9, 14, 5, 7]


@pytest.mark.parametrize(
    ("kind", "num_devices"), [("layered", 1), ("layered", 2), ("layered", 3), ("whole", 2)]
)
def test_ten_late_steps_equal_the_delayed_recurrence(
    kind, num_devices, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    theirs, make = MAKERS[kind]
    delayed = Delayed(plain(tiny_llama(layers=3)), theirs)
    wrapped = wrap(tiny_llama(layers=3), num_devices)
    optimizer = make(wrapped.optim_parameters())
    rates = [CosineAnnealingLR(each, 10) for each in (delayed.optimizer, optimizer)]
    expected, found = [], []
    for seed in range(10):
        batch = batches.sequences(LENGTHS, seed=seed)
        expected.append(delayed.reference.forward_backward(batch, 4).item())
        delayed.step(is_async=True, max_norm=1.0)
        found.append(train_lm(wrapped, batch, 4).item())
        wrapped.step(optimizer, is_async=True, max_grad_norm=1.0)
        for rate in rates:
            rate.step()

    assert found == expected
    same_bits(wrapped.state_dict(), delayed.newest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_steps_read_the_first_weights_twice(
    dtype, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(dtype=dtype), square_loss), adamw)
    wrapped = wrap(tiny_tower(dtype=dtype), 2)
    optimizer = ours(wrapped.optim_parameters())
    batch = batches.points(6, dtype=dtype)
    losses = []
    for steps in range(1, 4):
        expected = delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=True)
        losses.append(train_xy(wrapped, batch, square_loss, 3))
        wrapped.step(optimizer, is_async=True)
        assert torch.equal(losses[-1], expected)
        if steps == 1:  # nothing reads it yet, yet it is what is saved
            same_bits(wrapped.state_dict(), delayed.newest())
    assert torch.equal(losses[0], losses[1])
    assert losses[2] < losses[1]
    same_bits(wrapped.state_dict(), delayed.newest())


@pytest.mark.parametrize(
    ("num_devices", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32)]
)
def test_evaluating_and_saving_in_between_see_the_newest_and_change_nothing(
    num_devices, dtype, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    delayed = Delayed(plain(tiny_llama(dtype=dtype, layers=2)), adamw)
    wrapped = wrap(tiny_llama(dtype=dtype, layers=2), num_devices)
    optimizer = ours(wrapped.optim_parameters())
    newest = tiny_llama(dtype=dtype, layers=2)
    for seed in range(6):
        batch = batches.sequences(LENGTHS, seed=seed)
        expected = delayed.reference.forward_backward(batch, 4)
        delayed.step(is_async=True)
        assert torch.equal(train_lm(wrapped, batch, 4), expected)
        wrapped.step(optimizer, is_async=True)
        if seed in (0, 3):
            newest.load_state_dict(delayed.newest())
            wrapped.eval()
            with torch.no_grad():
                found = wrapped(
                    **batch, roundpipe_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1)
                )
                assert torch.equal(found.logits, newest.eval()(**batch).logits)
            wrapped.train()
        if seed in (1, 3):
            same_bits(wrapped.state_dict(), delayed.newest())
        if seed == 4:
            wrapped.synchronize()
    same_bits(wrapped.state_dict(), delayed.newest())


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synchronize_gives_the_module_the_newest_weights_and_changes_nothing_else(
    dtype, by_function, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(dtype=dtype), square_loss), adamw)
    module = tiny_tower(dtype=dtype)
    wrapped = wrap(module, 2)
    optimizer = ours(wrapped.optim_parameters())
    for seed in range(6):
        batch = batches.points(6, seed=seed, dtype=dtype)
        expected = delayed.reference.forward_backward(batch, 3)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        if seed == 2:  # between a call and its step
            wrapped.synchronize()
            same_bits(module.state_dict(), delayed.newest())
        delayed.step(is_async=True)
        wrapped.step(optimizer.step if by_function else optimizer, is_async=True)
        if seed in (1, 3, 4):
            wrapped.synchronize()
            wrapped.synchronize()
            same_bits(module.state_dict(), delayed.newest())
    same_bits(wrapped.state_dict(), delayed.newest())


def test_synchronize_between_forward_and_its_backward_changes_no_gradient(
    batches, tiny_tower, square_loss, wrap, train_xy, same_bits
):
    found = []
    for looks in (False, True):
        wrapped = wrap(tiny_tower(), 2)
        optimizer = ours(wrapped.optim_parameters())
        batch = batches.points(6)
        train_xy(wrapped, batch, square_loss, 3)
        wrapped.step(optimizer, is_async=True)
        outputs = wrapped(batch["x"])
        if looks:
            wrapped.synchronize()
        outputs.sum().backward()
        wrapped.step(optimizer)
        found.append(wrapped.state_dict())
    same_bits(*found)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_and_exact_steps_may_take_turns(
    kind, dtype, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    theirs, make = MAKERS[kind]
    delayed = Delayed(plain(tiny_tower(dtype=dtype), square_loss), theirs)
    wrapped = wrap(tiny_tower(dtype=dtype), 2)
    optimizer = make(wrapped.optim_parameters())
    turns = [0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0]
    for seed, is_async in enumerate(turns):
        batch = batches.points(6, seed=seed, dtype=dtype)
        expected = delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=bool(is_async), max_norm=2.0)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        wrapped.step(optimizer, is_async=bool(is_async), max_grad_norm=2.0)
    same_bits(wrapped.state_dict(), delayed.newest())


def test_calls_that_add_up_read_the_same_late_weights(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """Both calls of step k read version k - 1, though the update of step k - 1 is long done."""
    delayed = Delayed(plain(tiny_tower(), square_loss), adamw)
    wrapped = wrap(tiny_tower(), 2)
    optimizer = ours(wrapped.optim_parameters())
    for seed in range(4):
        sums = {}
        for call in range(2):
            batch = batches.points(6, seed=10 * seed + call)
            expected = delayed.reference.forward_backward(batch, 3)
            for name, grad in delayed.reference.gradients().items():
                sums[name] = sums[name] + grad if name in sums else grad
            assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), (seed, call)
        delayed.reference.sums = sums
        delayed.step(is_async=True)
        wrapped.step(optimizer, is_async=True)
    same_bits(wrapped.state_dict(), delayed.newest())


def test_numbers_of_microbatches_and_calls_may_change_between_late_steps(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(), square_loss), adamw)
    wrapped = wrap(tiny_tower(), 3)
    optimizer = ours(wrapped.optim_parameters())
    for seed, sizes in enumerate([(6,), (2,), (5, 3), (6,), (1,), (4, 4, 1), (6,)]):
        sums = {}
        for call, size in enumerate(sizes):
            batch = batches.points(size, seed=10 * seed + call)
            expected = delayed.reference.forward_backward(batch, 4)
            for name, grad in delayed.reference.gradients().items():
                sums[name] = sums[name] + grad if name in sums else grad
            assert torch.equal(train_xy(wrapped, batch, square_loss, 4), expected), (seed, call)
        delayed.reference.sums = sums
        delayed.step(is_async=True)
        wrapped.step(optimizer, is_async=True)
    same_bits(wrapped.state_dict(), delayed.newest())


def test_closing_after_a_late_step_leaves_the_newest_weights_in_the_module(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(), square_loss), adamw)
    model = tiny_tower()
    wrapped = wrap(model, 2)
    optimizer = ours(wrapped.optim_parameters())
    for seed in range(3):
        batch = batches.points(6, seed=seed)
        delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=True)
        train_xy(wrapped, batch, square_loss, 3)
        wrapped.step(optimizer, is_async=True)
    wrapped.close()
    same_bits(dict(model.named_parameters()), delayed.newest())


def test_a_late_step_by_a_function_is_exact_from_then_on(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """A function runs when all gradients are there and publishes at once, also after late steps."""
    delayed = Delayed(plain(tiny_tower(), square_loss), momentum)
    wrapped = wrap(tiny_tower(), 2)
    optimizer = momentum(wrapped.optim_parameters())
    for seed, by_function in enumerate([False, False, True, True, False, True]):
        batch = batches.points(6, seed=seed)
        expected = delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=not by_function)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        if by_function:
            wrapped.step(optimizer.step)
        else:
            wrapped.step(optimizer, is_async=True)
    same_bits(wrapped.state_dict(), delayed.newest())


def test_a_late_step_that_is_skipped_leaves_the_weights_and_the_delay(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(), square_loss), adamw)
    wrapped = wrap(tiny_tower(), 2)
    optimizer = ours(wrapped.optim_parameters())
    for seed in range(6):
        batch = batches.points(6, seed=seed)
        if seed == 2:
            batch["x"][0] = torch.inf
        expected = delayed.reference.forward_backward(batch, 3)
        if seed == 2:
            delayed.reference.sums = {}  # the call after it reads the newest: nothing is under way
        delayed.step(is_async=True)
        found = train_xy(wrapped, batch, square_loss, 3)
        assert torch.equal(found, expected) or seed == 2, seed
        assert wrapped.step(optimizer, is_async=True).skipped == (seed == 2)
    same_bits(wrapped.state_dict(), delayed.newest())


def test_after_a_change_of_what_is_trained_a_call_reads_the_newest(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """A layer that is frozen keeps one set of weights, so all layers must be of one version."""
    delayed = Delayed(plain(tiny_tower(), square_loss), adamw)
    model = tiny_tower()
    wrapped = wrap(model, 2)
    optimizer = ours(wrapped.optim_parameters())
    before = []
    for seed, frozen in enumerate([[], [], [1], [1], [1, 3], [3], [], []]):
        for layer, (mine, theirs) in enumerate(zip(model, delayed.model, strict=True)):
            mine.requires_grad_(layer not in frozen)
            theirs.requires_grad_(layer not in frozen)
        wrapped.synchronize()
        if frozen != before:
            delayed.read(delayed.masters)
        before = frozen
        batch = batches.points(6, seed=seed)
        expected = delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=True)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        wrapped.step(optimizer, is_async=True)
    same_bits(wrapped.state_dict(), delayed.newest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_a_part_keeps_the_newest_of_the_rest(
    dtype, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(dtype=dtype), square_loss), adamw)
    wrapped = wrap(tiny_tower(dtype=dtype), 2)
    optimizer = ours(wrapped.optim_parameters())
    part = {"1.up.weight": torch.full((32, 16), 0.25, dtype=dtype)}
    for seed in range(5):
        batch = batches.points(6, seed=seed, dtype=dtype)
        expected = delayed.reference.forward_backward(batch, 3)
        delayed.step(is_async=True)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        wrapped.step(optimizer, is_async=True)
        if seed == 2:
            wrapped.load_state_dict(part, strict=False)
            delayed.masters["1.up.weight"].data.fill_(0.25)
            delayed.read(delayed.masters)
    same_bits(wrapped.state_dict(), delayed.newest())
    same_bits(dict(wrapped.optim_named_parameters()), delayed.masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_late_and_exact_steps_by_a_function_follow_the_recurrence(
    num_devices, dtype, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    delayed = Delayed(plain(tiny_tower(dtype=dtype), square_loss), momentum)
    wrapped = wrap(tiny_tower(dtype=dtype), num_devices)
    optimizer = momentum(wrapped.optim_parameters())
    kinds = [(True, True), (True, True), (False, True), (True, False), (True, True), (True, True)]
    for seed, (is_async, by_function) in enumerate(kinds):
        batch = batches.points(6, seed=seed, dtype=dtype)
        expected = delayed.reference.forward_backward(batch, 3)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected), seed
        delayed.step(is_async=is_async)
        wrapped.step(optimizer.step if by_function else optimizer, is_async)
        if seed == 4:  # nothing reads it yet, yet it is what is saved
            same_bits(wrapped.state_dict(), delayed.newest())
    same_bits(wrapped.state_dict(), delayed.newest())
