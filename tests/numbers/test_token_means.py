"""A batch's split changes nothing: losses and gradients are those of the whole batch.

Sums run in another order than unsplit, hence 1e-6; against the plain loop over the same
microbatches they run in the same order, hence the same bits.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

LENGTHS = [3, 40, 17, 5, 28, 11]


@pytest.mark.parametrize("num_microbatch", [1, 2, 3, 6])
def test_the_mean_over_tokens_does_not_depend_on_the_split(
    num_microbatch, batches, tiny_llama, plain, wrap, train_lm, same_bits, close_to
):
    batch = batches.sequences(LENGTHS, masked=0.6)
    whole = tiny_llama()
    loss = whole(**batch, use_cache=False).loss  # transformers' own mean over the whole batch
    loss.backward()
    unsplit = {name: p.grad for name, p in whole.named_parameters()}
    reference = plain(tiny_llama())
    expected = reference.forward_backward(batch, num_microbatch)
    gradients = reference.gradients()

    wrapped = wrap(tiny_llama(), 1 + num_microbatch % 3)
    found = train_lm(wrapped, batch, num_microbatch)

    assert torch.equal(found, expected)
    same_bits(wrapped.gradients(), gradients)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    close_to(wrapped.gradients(), unsplit)


def test_random_lengths_and_masks_in_random_splits_give_the_mean_of_the_whole(
    batches, tiny_llama, wrap, train_lm, close_to
):
    wrapped, whole = wrap(tiny_llama(layers=2), 2), tiny_llama(layers=2)
    rng = random.Random(0)
    for seed in range(6):  # lengths change from step to step, some are shorter than all before
        lengths = [rng.randint(3, 40) for _ in range(rng.randint(1, 7))]
        batch = batches.sequences(lengths, seed=seed, masked=rng.random())
        loss = whole(**batch, use_cache=False).loss
        loss.backward()

        found = train_lm(wrapped, batch, rng.choice([1, 2, 3, 6]))

        assert found.item() == pytest.approx(loss.item(), rel=1e-6)
        close_to(wrapped.gradients(), {n: p.grad for n, p in whole.named_parameters()})
        wrapped.zero_grad()
        whole.zero_grad()


def test_a_microbatch_without_any_label_adds_nothing(batches, tiny_llama, wrap, train_lm, close_to):
    batch = batches.sequences([9, 12, 7, 10])
    batch["labels"][1] = -100  # the second of four microbatches
    whole, wrapped = tiny_llama(layers=2), wrap(tiny_llama(layers=2), 2)
    loss = whole(**batch, use_cache=False).loss
    loss.backward()

    assert train_lm(wrapped, batch, 4).item() == pytest.approx(loss.item(), rel=1e-6)
    close_to(wrapped.gradients(), {n: p.grad for n, p in whole.named_parameters()})


def test_the_number_of_microbatches_is_planned_without_changing_the_loss(
    batches, tiny_llama, wrap, train_lm
):
    batch = batches.sequences([9, 12, 7, 10, 3, 5])
    loss = tiny_llama(layers=2)(**batch, use_cache=False).loss

    assert train_lm(wrap(tiny_llama(layers=2), 2), batch).item() == pytest.approx(loss.item(), 1e-6)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_uneven_splits_run_the_microbatches_that_exist(
    num_devices, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits, close_to
):
    wrapped = wrap(tiny_tower(), num_devices)
    for size in range(1, 10):
        batch = batches.points(size, seed=size)
        whole, reference = plain(tiny_tower(), square_loss), plain(tiny_tower(), square_loss)
        unsplit, expected = whole.forward_backward(batch, 1), reference.forward_backward(batch, 4)

        found = train_xy(wrapped, batch, square_loss, 4)

        assert torch.equal(found, expected)
        assert found.item() == pytest.approx(unsplit.item(), rel=1e-6)
        gradients = wrapped.gradients()
        same_bits(gradients, reference.gradients())
        close_to(gradients, whole.gradients(), 2e-6)
        wrapped.zero_grad()


def test_a_causal_lm_runs_the_microbatches_that_exist(
    batches, tiny_llama, plain, wrap, train_lm, same_bits, close_to
):
    """Batches of sequences, each of other lengths, one after the other in four or fewer."""
    wrapped = wrap(tiny_llama(layers=2), 2)
    for size in (1, 3, 4, 5, 9):
        lengths = [3 + (5 * at + size) % 11 for at in range(size)]
        batch = batches.sequences(lengths, seed=size)
        whole, reference = plain(tiny_llama(layers=2)), plain(tiny_llama(layers=2))
        unsplit, expected = whole.forward_backward(batch, 1), reference.forward_backward(batch, 4)

        found = train_lm(wrapped, batch, 4)

        assert torch.equal(found, expected)
        assert found.item() == pytest.approx(unsplit.item(), rel=1e-6)
        gradients = wrapped.gradients()
        same_bits(gradients, reference.gradients())
        close_to(gradients, whole.gradients(), 2e-6)
        wrapped.zero_grad()


def test_a_planned_split_weighs_a_mean_by_samples(
    batches, tiny_tower, plain, wrap, train_xy, close_to
):
    batch = batches.points(11)  # in eight microbatches of one or two samples
    whole = plain(tiny_tower(), nn.functional.mse_loss)
    loss = whole.forward_backward(batch, 1)
    wrapped = wrap(tiny_tower(), 2)

    found = train_xy(wrapped, batch, nn.functional.mse_loss)

    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    close_to(wrapped.gradients(), whole.gradients(), 2e-6)


def test_a_token_mean_of_a_loss_function_is_over_the_whole_step(tiny_tower, wrap, close_to):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 10, 8, generator=generator)
    labels = torch.randint(0, 4, (6, 10), generator=generator)
    labels[torch.rand(6, 10, generator=generator) < 0.5] = -100
    labels[2, 1:] = -100  # no trained token at all in the third microbatch

    def shifted(outputs, labels):
        return nn.functional.cross_entropy(
            outputs[:, :-1].reshape(-1, 4), labels[:, 1:].reshape(-1), ignore_index=-100
        )

    whole = tiny_tower()
    loss = shifted(whole(x), labels)
    loss.backward()
    wrapped = wrap(tiny_tower(), 2, loss_reduction="token_mean")

    found = wrapped.forward_backward((x,), label=labels, loss_fn=shifted)

    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    close_to(wrapped.gradients(), {n: p.grad for n, p in whole.named_parameters()})


def test_a_loss_function_over_a_causal_lms_logits_equals_its_own_loss(
    batches, tiny_llama, wrap, train_lm, close_to
):
    batch = batches.sequences(LENGTHS, masked=0.6)
    labels = batch["labels"]

    def shifted(outputs, labels):
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)

    own, given = (
        wrap(tiny_llama(layers=2), 2),
        wrap(tiny_llama(layers=2), 2, loss_reduction="token_mean"),
    )
    expected = train_lm(own, batch, 3)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    found = given.forward_backward(input_kwargs=inputs, label=labels, loss_fn=shifted)

    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    close_to(given.gradients(), own.gradients(), 2e-6)


def test_gradients_looked_at_between_calls_are_those_of_one_mean(
    batches, tiny_llama, plain, wrap, train_lm
):
    """The first call divided by its own tokens: whoever looks sees the mean over both calls'."""
    reference, wrapped = plain(tiny_llama(layers=2)), wrap(tiny_llama(layers=2), 2)
    both = [batches.sequences([5, 9], seed=0), batches.sequences([14, 12], seed=1)]
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in both)
    for batch in both:
        reference.forward_backward(batch, 2, tokens=tokens)
        train_lm(wrapped, batch, 2)
    expected = reference.gradients()
    for _ in range(2):  # looking again changes nothing
        wrapped.synchronize()
        found = {name: p.grad for name, p in wrapped.named_parameters()}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    before = {name: p.detach().clone() for name, p in wrapped.optim_named_parameters()}
    wrapped.step(torch.optim.SGD(wrapped.optim_parameters(), lr=1.0))
    wrapped.synchronize()
    for name, master in wrapped.optim_named_parameters():
        torch.testing.assert_close(before[name] - master, expected[name], rtol=1e-4, atol=1e-6)
