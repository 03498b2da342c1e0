"""A causal LM's own loss in chunks of tokens: plain numbers, and the same bits on any devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roundpipe.models import chunked_loss
from roundpipe.optim import AdamW

LENGTHS = (12, 9, 14, 7)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of four tokens, in a loss that would be made at once."""
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 0)
    monkeypatch.setattr(chunked_loss, "TRAINED_ROWS", 4)
    monkeypatch.setattr(chunked_loss, "FROZEN_ROWS", 4)
    monkeypatch.setattr(chunked_loss, "_TILE", 1)


@pytest.fixture
def counted(monkeypatch):
    """How many chunks were made."""
    made = []
    own = chunked_loss._run_chunk
    monkeypatch.setattr(
        chunked_loss, "_run_chunk", lambda *args: made.append(args[2]) or own(*args)
    )
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_plain_loop(
    tied, wrap, tiny_llama, twin, plain, batches, train_lm, close_to, copies, counted
):
    model = tiny_llama(tied=tied)
    other = plain(twin(model))
    batch = batches.sequences(LENGTHS)
    wanted = other.forward_backward(batch, 2)
    wrapped = wrap(model, 2)
    counted.clear()
    loss = train_lm(wrapped, batch, 2)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    close_to(copies(wrapped.gradients()), other.gradients(), tolerance=2e-6)
    assert len(counted) == 14  # 28 tokens in each of two microbatches


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_one_to_three_devices_give_the_same_bits(
    grain, wrap, tiny_llama, twin, batches, train_lm, same_bits, copies
):
    model = tiny_llama(tied=True)
    found = []
    for devices in (1, 2, 3):
        wrapped = wrap(twin(model), devices)
        optimizer = AdamW(wrapped.optim_parameters(), lr=1e-2)
        losses = []
        for seed in range(3):
            batch = batches.sequences(LENGTHS, seed)
            losses.append(train_lm(wrapped, batch, 2, recompute_grain=grain))
            wrapped.step(optimizer)
        found.append({**copies(wrapped.state_dict()), "losses": torch.stack(losses)})
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])


def test_calls_of_one_step_add_up(
    wrap, tiny_llama, twin, plain, batches, train_lm, close_to, copies
):
    model = tiny_llama()
    other = plain(twin(model))
    wrapped = wrap(model)
    first, second = (batches.sequences(LENGTHS, seed) for seed in (0, 1))
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in (first, second))
    for batch in (first, second):
        other.forward_backward(batch, 2, tokens=tokens)
        train_lm(wrapped, {**batch, "num_items_in_batch": tokens}, 2)
    close_to(copies(wrapped.gradients()), other.gradients(), tolerance=2e-6)


def test_outputs_that_were_asked_for_hold_all_logits(wrap, tiny_llama, batches, train_lm, counted):
    wrapped = wrap(tiny_llama())
    counted.clear()
    batch = batches.sequences(LENGTHS)
    loss, outputs = train_lm(wrapped, batch, 2, return_outputs=True)
    assert outputs.logits.shape == (4, 14, 96)
    with torch.no_grad():
        evaluated = wrapped(**batch)
    assert evaluated.logits.shape == (4, 14, 96)
    torch.testing.assert_close(evaluated.loss, loss, rtol=1e-6, atol=0)
    assert not counted


def test_a_loss_function_of_the_callers_gets_all_logits(wrap, tiny_llama, batches, split_in):
    wrapped = wrap(tiny_llama())
    batch = batches.sequences(LENGTHS)
    seen = []

    def loss_fn(outputs, label):
        seen.append(outputs.logits.shape)
        return outputs.logits.float().square().mean()

    wrapped.forward_backward(
        input_kwargs=batch, label=batch["labels"], loss_fn=loss_fn, run_config=split_in(2)
    )
    assert seen == [(2, 14, 96)] * 2


def test_under_the_callers_autocast_it_is_the_plain_loop_in_bf16(
    wrap, tiny_llama, twin, plain, batches, train_lm, close_to, copies
):
    model = tiny_llama()
    other = plain(twin(model))
    batch = batches.sequences(LENGTHS)

    def cast(_):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    wanted = other.forward_backward(batch, 2, around=cast)
    wrapped = wrap(model, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = train_lm(wrapped, batch, 2)
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)
    close_to(copies(wrapped.gradients()), other.gradients(), tolerance=0.05)


def test_a_pass_without_gradient_can_do_without_logits_too(
    wrap, tiny_llama, batches, counted, monkeypatch
):
    wrapped = wrap(tiny_llama(), 2)
    batch = batches.sequences(LENGTHS)
    with torch.no_grad():
        whole = wrapped(**batch)
    own = wrapped._call
    monkeypatch.setattr(wrapped, "_call", lambda *a, **k: replace(own(*a, **k), wants_logits=False))
    counted.clear()
    with torch.no_grad():
        cut = wrapped(**batch)
    assert counted
    assert cut.logits is None
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-6, atol=0)


def test_the_plan_counts_a_chunk_as_what_the_last_layer_takes_for_a_moment(
    wrap, tiny_llama, batches, train_lm
):
    wrapped = wrap(tiny_llama())
    before = wrapped.planner.costs.layers[-1]
    optimizer = AdamW(wrapped.optim_parameters(), lr=1e-2)
    for seed in range(3):
        train_lm(wrapped, batches.sequences(LENGTHS, seed), 2)
        wrapped.step(optimizer)
    wrapped.synchronize()
    after = wrapped.planner.costs.layers[-1]
    chunk = 4 * 96 * 4  # tokens, words, bytes
    hidden = 2 * 14 * 32 * 4
    assert after.peak_bytes == before.peak_bytes + max(chunk, 2 * hidden)
    # The norm's input and what it makes of it, and the gradient of the hidden state: no logits.
    assert after.activation_bytes < 6 * hidden
