"""Clipping is by the global norm over all parameter groups, known before any layer is updated."""

from __future__ import annotations

import pytest
import torch

import roundpipe


class Unknown(torch.optim.AdamW):
    """An optimizer that steps as a whole, as anything not known does."""


KINDS = {
    "layered": (roundpipe.optim.AdamW, {"foreach": False, "fused": False}),
    "by parameter": (torch.optim.AdamW, {"foreach": False, "fused": False}),
    "whole": (Unknown, {"foreach": False, "fused": False}),
}


def groups(named):
    """As trainers do it: matrices decay, vectors do not, the first layer learns more slowly."""
    named = list(named)
    first = [p for n, p in named if n.startswith("0.")]
    matrices = [p for n, p in named if p.dim() > 1 and not n.startswith("0.")]
    vectors = [p for n, p in named if p.dim() < 2 and not n.startswith("0.")]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
        {"params": first, "lr": 1e-3, "weight_decay": 0.2},
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_every_group_is_clipped_and_the_norm_is_the_one_before(
    kind, num_devices, max_norm, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(tiny_tower(), square_loss)
    plain_adamw = torch.optim.AdamW(
        groups(reference.model.named_parameters()), lr=1e-2, foreach=False, fused=False
    )
    make, settings = KINDS[kind]
    wrapped = wrap(tiny_tower(), num_devices)
    settings = {} if make is roundpipe.optim.AdamW else settings
    adamw = make(groups(wrapped.optim_named_parameters()), lr=1e-2, **settings)
    results, norms = [], []
    for seed in range(4):
        batch = batches.points(6, seed=seed)
        reference.forward_backward(batch, 3)
        norms.append(reference.step(plain_adamw, max_norm))
        train_xy(wrapped, batch, square_loss, 3)
        results.append(wrapped.step(adamw, max_grad_norm=max_norm))

    assert [r.grad_norm.item() for r in results] == [n.item() for n in norms]
    assert (norms[0] > 0.5).item()  # 0.5 does clip
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_clipping_one_step_late_clips_by_the_late_gradients_norm(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(tiny_tower(), square_loss)
    plain_adamw = torch.optim.AdamW(
        groups(reference.model.named_parameters()), lr=1e-2, foreach=False, fused=False
    )
    wrapped = wrap(tiny_tower(), 2)
    adamw = roundpipe.optim.AdamW(groups(wrapped.optim_named_parameters()), lr=1e-2)
    results, norms, held_back = [], [], {}
    for seed in range(5):
        batch = batches.points(6, seed=seed)
        reference.forward_backward(batch, 3)
        held_back, reference.sums = reference.sums, held_back
        if reference.sums:
            norms.append(reference.step(plain_adamw, 0.5))
        train_xy(wrapped, batch, square_loss, 3)
        results.append(wrapped.step(adamw, is_async=True, max_grad_norm=0.5))
    reference.sums = held_back
    norms.append(reference.step(plain_adamw, 0.5))

    same_bits(wrapped.state_dict(), reference.model.state_dict())
    assert [r.grad_norm.item() for r in results] == [n.item() for n in norms]


def test_a_function_in_place_of_an_optimizer_gets_clipped_gradients(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(tiny_tower(), square_loss)
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=0.1)
    wrapped = wrap(tiny_tower(), 2)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1)
    calls = []

    def function(times, *, word):
        calls.append((times, word))
        sgd.step()

    for seed in range(3):
        batch = batches.points(6, seed=seed)
        reference.forward_backward(batch, 3)
        norm = reference.step(plain_sgd, 0.7)
        train_xy(wrapped, batch, square_loss, 3)
        result = wrapped.step(function, False, 3, word="x", max_grad_norm=0.7)
        assert torch.equal(result.grad_norm, norm)

    assert calls == [(3, "x")] * 3
    same_bits(wrapped.state_dict(), reference.model.state_dict())
    assert all(p.grad is None for p in wrapped.optim_parameters())


def test_a_step_whose_norm_is_not_finite_changes_nothing(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits, copies
):
    reference = plain(tiny_tower(), square_loss)
    plain_adamw = torch.optim.AdamW(
        reference.model.parameters(), lr=1e-2, foreach=False, fused=False
    )
    wrapped = wrap(tiny_tower(), 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    before = copies(wrapped.state_dict())
    bad = batches.points(6)
    bad["x"][4] = torch.inf

    train_xy(wrapped, bad, square_loss, 3)
    result = wrapped.step(adamw, max_grad_norm=1.0)

    assert result.skipped
    same_bits(wrapped.state_dict(), before)
    for seed in range(2):  # and the next ones are as if it had never been
        batch = batches.points(6, seed=seed)
        reference.forward_backward(batch, 3)
        reference.step(plain_adamw, 1.0)
        train_xy(wrapped, batch, square_loss, 3)
        assert not wrapped.step(adamw, max_grad_norm=1.0).skipped
    same_bits(wrapped.state_dict(), reference.model.state_dict())
