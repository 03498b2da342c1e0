"""A mean of means is not the mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from roundpipe.errors import ConfigError
from roundpipe.models.loss import (
    LossCount,
    check_reduction,
    count_trained_tokens,
    loss_factor,
    scale_loss,
)


def test_the_first_label_of_a_sequence_is_never_trained():
    labels = torch.tensor([[5, -100, 7, 8], [1, 2, -100, -100]])
    assert count_trained_tokens(labels) == 3


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_token_mean_over_any_split_is_the_mean_over_all_tokens(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    parts = [torch.rand(count, generator=generator, dtype=torch.float64) for count in counts]
    step = LossCount.total([LossCount(1, count) for count in counts])
    total = sum(
        scale_loss(part.mean(), loss_factor("token_mean", LossCount(1, len(part)), step))
        for part in parts
    )
    torch.testing.assert_close(total, torch.cat(parts).mean())


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_factors_of_a_mean_add_up_to_one(samples):
    step = LossCount(sum(samples))
    assert sum(loss_factor("mean", LossCount(n), step) for n in samples) == pytest.approx(1.0)


def test_sum_takes_losses_as_they_are():
    loss = torch.ones(())
    assert scale_loss(loss, loss_factor("sum", LossCount(1), LossCount(9))) is loss


def test_a_microbatch_without_a_trained_token_adds_zero_and_no_nan():
    logits = torch.randn(4, 7, requires_grad=True)
    loss = functional.cross_entropy(logits, torch.full((4,), -100))
    assert loss.isnan()
    scaled = scale_loss(loss, loss_factor("token_mean", LossCount(1, 0), LossCount(2, 5)))
    scaled.backward()
    assert scaled.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(4, 7))


@pytest.mark.parametrize("reduction", ["mean", "token_mean"])
def test_a_step_with_nothing_to_train_on_is_an_error(reduction):
    with pytest.raises(ConfigError, match="nothing to train on in this step"):
        loss_factor(reduction, LossCount(0, 0), LossCount(0, 0))


def test_an_unknown_reduction_is_an_error_that_names_the_known_ones():
    assert check_reduction("token_mean") == "token_mean"
    with pytest.raises(ConfigError, match=r"unknown loss reduction: average\nhint: sum, mean"):
        check_reduction("average")
