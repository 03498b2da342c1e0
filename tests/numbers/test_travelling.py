"""Inputs, labels and shapes belong to their microbatch, whatever the timing of streams and workers.

The devices delay each work by a random while and fill released memory with NaN, so that whatever is
used too early or too late shows in the bits.
"""

from __future__ import annotations

import pytest
import torch

from roundpipe.device.cpu import CpuDevice


def unsteady(count, seed):
    return [
        CpuDevice(
            f"cpu{i}", threads=1, max_delay_seconds=5e-4, seed=seed + 100 * i, poison_released=True
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_labels_stay_with_their_inputs_under_delays(
    seed, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """Each microbatch has targets of another size: a label of another would change the sum."""
    batch = batches.points(6)
    batch["y"] = batch["y"] * torch.logspace(0, 3, 6)[:, None]
    reference = plain(tiny_tower(), square_loss)
    expected = reference.forward_backward(batch, 6)
    gradients = reference.gradients()
    wrapped = wrap(tiny_tower(), unsteady(3, seed))

    for _ in range(2):
        assert torch.equal(train_xy(wrapped, batch, square_loss, 6), expected)
        same_bits(wrapped.gradients(), gradients)
        wrapped.zero_grad()


@pytest.mark.parametrize(("seed", "is_async"), [(0, False), (1, True)])
def test_lengths_may_change_between_microbatches_and_steps_under_delays(
    seed, is_async, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    """Chained steps, no flush between them; the lengths of one step are not those of the next."""
    steps = [
        batches.sequences(lengths, seed=i)
        for i, lengths in enumerate(([9, 9, 9], [4, 21, 3], [30, 5], [3, 3, 4], [17, 8, 12]))
    ]
    reference = plain(tiny_llama(layers=3))
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=0.3)
    wrapped = wrap(tiny_llama(layers=3), unsteady(2, seed))
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=0.3)
    held_back = None
    for batch in steps:
        expected = reference.forward_backward(batch, 3)
        if not is_async:
            reference.step(plain_sgd)
        else:  # one step late: the gradients of this call are applied after the next one
            if held_back is not None:
                apply(reference.model, held_back, plain_sgd)
            held_back = reference.gradients()
        assert torch.equal(train_lm(wrapped, batch, 3), expected)
        wrapped.step(sgd, is_async=is_async)
    if held_back is not None:
        apply(reference.model, held_back, plain_sgd)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def apply(model, gradients, optimizer):
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    optimizer.step()
    optimizer.zero_grad()


class Widening(torch.nn.Module):
    """Hands on more rows than it got: a boundary whose shape hangs on the microbatch's values."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.cat([x, x[: 1 + len(x) // 2]]) * self.scale


def test_a_boundary_may_have_another_shape_in_each_microbatch(
    batches, tiny_tower, wrap, train_xy, plain, same_bits
):
    def loss(outputs, labels):
        return outputs.square().sum() + labels.sum()

    def model():
        tower = tiny_tower(blocks=3)
        tower.insert(2, Widening())
        return tower

    batch = batches.points(9)
    reference = plain(model(), loss)
    expected = reference.forward_backward(batch, 4)
    wrapped = wrap(model(), unsteady(2, 7))

    assert torch.equal(train_xy(wrapped, batch, loss, 4), expected)
    same_bits(wrapped.gradients(), reference.gradients())


def test_inputs_may_be_overwritten_when_a_call_returns(wrap, tiny_tower, batches, square_loss):
    """Backward goes on behind it and reads them again."""
    batch = batches.points(6)
    ours, other = wrap(tiny_tower(), 2), wrap(tiny_tower(), 2)
    for model, overwrites in ((ours, True), (other, False)):
        x, y = batch["x"].clone(), batch["y"].clone()
        model.forward_backward((x,), label=y, loss_fn=square_loss)
        if overwrites:
            x.fill_(float("nan"))
            y.fill_(float("nan"))
        loss = square_loss(model(x.nan_to_num()), y.nan_to_num())
        if overwrites:
            assert loss.isfinite()
    mine = wrap(tiny_tower(), 2)
    x = batch["x"].clone()
    out = mine(x)
    x.fill_(float("nan"))
    square_loss(out, batch["y"]).backward()
    assert all(gradient.isfinite().all() for gradient in mine.gradients().values())
    found, expected = ours.gradients(), other.gradients()
    assert all(found[name].equal(expected[name]) for name in expected)
