"""Gradients add up over microbatches and calls in fp32, and bf16 weights have fp32 masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe

BF16 = torch.bfloat16


def quarters(batch):
    """A batch of eight as four calls of two."""
    return [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, 8, 2)]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_four_accumulated_calls_equal_one_big_batch(
    num_devices, dtype, batches, tiny_tower, square_loss, wrap, train_xy, close_to, plain
):
    batch = batches.points(8, dtype=dtype)
    whole = plain(tiny_tower(dtype=dtype), square_loss)
    loss = whole.forward_backward(batch, 4)
    wrapped = wrap(tiny_tower(dtype=dtype), num_devices)

    losses = [train_xy(wrapped, part, square_loss, 1) for part in quarters(batch)]

    assert sum(x.item() for x in losses) == pytest.approx(loss.item(), rel=1e-6)
    gradients = wrapped.gradients()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    # one microbatch of bf16 gives the same bits; that they add up in another order is fp32's
    close_to(gradients, whole.sums, 2e-6)


def test_calls_of_several_microbatches_add_up_call_by_call(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(tiny_tower(), square_loss)
    wrapped = wrap(tiny_tower(), 3)
    total = {}
    for seed in range(3):
        batch = batches.points(5, seed=seed)
        reference.forward_backward(batch, 3)
        for name, grad in reference.gradients().items():
            total[name] = total[name] + grad if name in total else grad
        train_xy(wrapped, batch, square_loss, 3)

    same_bits(wrapped.gradients(), total)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_accumulated_calls_of_a_causal_lm_are_one_mean_over_tokens(
    dtype, batches, tiny_llama, wrap, train_lm, plain, close_to
):
    """Calls with very different numbers of trained tokens; each reports its own mean."""
    batch = batches.sequences([30, 28, 3, 4, 12, 5, 7, 31], masked=0.5)
    whole = plain(tiny_llama(layers=2, dtype=dtype))
    loss = whole.forward_backward(batch, 8)
    wrapped = wrap(tiny_llama(layers=2, dtype=dtype), 2)
    tokens = [int((part["labels"][:, 1:] != -100).sum()) for part in quarters(batch)]
    losses = [train_lm(wrapped, part, 2) for part in quarters(batch)]
    taken = {}

    result = wrapped.step(
        lambda: taken.update({n: p.grad.clone() for n, p in wrapped.optim_named_parameters()})
    )

    mean = sum(x.item() * n for x, n in zip(losses, tokens, strict=True)) / sum(tokens)
    assert mean == pytest.approx(loss.item(), rel=1e-6 if dtype == torch.float32 else 1e-3)
    # divided by the first call's tokens and scaled at the end: each bf16 part is rounded elsewhere
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    close_to(taken, whole.sums, tolerance)
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in whole.sums.values()])
    )
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=tolerance)


class Scale(nn.Module):
    """One weight, whose gradient is the sum of its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=BF16))

    def forward(self, x):
        return x * self.weight


def total(outputs, labels):
    return outputs.float().sum()


def tiny_contributions():
    """1, then 255 times 2^-9: in bf16 each one alone would vanish beside the 1."""
    x = torch.full((256, 1), 2.0**-9, dtype=BF16)
    x[0] = 1.0
    return x


def test_256_tiny_bf16_contributions_of_microbatches_do_not_vanish(wrap, split_in):
    wrapped = wrap(nn.Sequential(Scale(), Scale()))

    wrapped.forward_backward((tiny_contributions(),), loss_fn=total, run_config=split_in(256))

    exact = 1 + 255 / 512
    for gradient in wrapped.gradients().values():
        assert gradient.item() == torch.tensor(exact).to(BF16).item()


def test_tiny_bf16_contributions_of_calls_do_not_vanish(wrap, split_in):
    wrapped = wrap(nn.Sequential(Scale(), Scale()), 2)

    for part in tiny_contributions()[:64].split(1):
        wrapped.forward_backward((part,), loss_fn=total, run_config=split_in(1))

    for gradient in wrapped.gradients().values():
        assert gradient.item() == 1 + 63 / 512


@pytest.mark.parametrize("is_async", [False, True])
def test_a_bf16_weight_of_one_moves_by_ten_thousandths(is_async, wrap, split_in):
    wrapped = wrap(nn.Sequential(Scale(), Scale()), 2)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-4)
    x = torch.ones(2, 1, dtype=BF16)

    for _ in range(50):
        wrapped.forward_backward((x,), loss_fn=total, run_config=split_in(2))
        wrapped.step(sgd, is_async=is_async)

    wrapped.synchronize()
    for master in wrapped.optim_parameters():
        assert master.dtype == torch.float32
        assert master.item() == pytest.approx(0.99, abs=1e-3)
    for weight in wrapped.state_dict().values():
        assert weight.dtype == BF16
        assert weight.item() == torch.tensor(0.99).to(BF16).item()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_bf16_steps_equal_a_plain_loop_with_fp32_masters(
    max_norm, batches, tiny_llama, plain, wrap, train_lm, same_bits, copies
):
    reference = plain(tiny_llama(layers=3, dtype=BF16))
    working = dict(reference.model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in working.items()}
    plain_adamw = torch.optim.AdamW(masters.values(), lr=1e-2, foreach=False, fused=False)
    wrapped = wrap(tiny_llama(layers=3, dtype=BF16), 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)

    for seed in range(4):
        batch = batches.sequences([9, 5, 12, 8], seed=seed)
        expected = reference.forward_backward(batch, 4)
        for name, grad in reference.gradients().items():
            masters[name].grad = grad.float()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(masters.values(), max_norm)
        plain_adamw.step()
        with torch.no_grad():
            for name, parameter in working.items():
                parameter.copy_(masters[name])
        assert torch.equal(train_lm(wrapped, batch, 4), expected)
        wrapped.step(adamw, max_grad_norm=max_norm)

    same_bits(wrapped.state_dict(), reference.model.state_dict())
    same_bits(dict(wrapped.optim_named_parameters()), masters)


def test_a_later_call_without_any_label_adds_nothing(batches, tiny_llama, wrap, train_lm, plain):
    batch = batches.sequences([9, 14, 5, 7])
    reference = plain(tiny_llama(layers=2))
    reference.forward_backward(batch, 2)
    wrapped = wrap(tiny_llama(layers=2), 2)
    train_lm(wrapped, batch, 2)

    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}

    assert train_lm(wrapped, nothing, 2) == 0
    for name, gradient in wrapped.gradients().items():
        assert torch.equal(gradient, reference.sums[name]), name
