"""Inputs that want a gradient get it from ``forward_backward`` too, through whatever made them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe


def gradients(model):
    model.synchronize()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("is_merged", [True, False])
def test_a_model_below_trains_through_the_one_above(
    is_merged, num_devices, tiny_tower, square_loss, wrap, batches, split_in
):
    batch = batches.points(5)
    lower, upper = tiny_tower(blocks=2)[:3], tiny_tower(blocks=2)[2:]
    ours = [wrap(model, num_devices) for model in (lower, upper)]
    loss = square_loss(upper(lower(batch["x"])), batch["y"])
    loss.backward()
    expected = [plain_gradients(model) for model in (lower, upper)]
    for model in (lower, upper):
        model.zero_grad()
    between = ours[0](
        batch["x"], roundpipe_run_config=split_in(3, merge_output=None if is_merged else False)
    )
    found, outputs = ours[1].forward_backward(
        (between,), label=batch["y"], loss_fn=square_loss, return_outputs=True,
        run_config=split_in(3),
    )  # fmt: skip
    assert_close(found, loss.detach())
    assert outputs.shape == (5, 4)
    assert not outputs.requires_grad
    for mine, theirs in zip(ours, expected, strict=True):
        assert_close(gradients(mine), theirs)


def test_embeddings_given_to_a_causal_lm_get_their_gradient(tiny_llama, wrap, batches, split_in):
    batch, model = batches.sequences([7, 4, 9, 5]), tiny_llama(layers=2)
    embeddings = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(0))
    theirs, mine = (embeddings.clone().requires_grad_() for _ in range(2))
    inputs = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
    loss = model(inputs_embeds=theirs, **inputs, use_cache=False).loss
    loss.backward()
    expected = plain_gradients(model)
    model.zero_grad()
    wrapped = wrap(model, 2)
    found = wrapped.forward_backward(
        input_kwargs={"inputs_embeds": mine, **inputs}, run_config=split_in(3)
    )
    assert_close(found, loss.detach())
    assert_close(mine.grad, theirs.grad)
    assert_close(gradients(wrapped), expected)


def test_calls_of_both_kinds_are_one_step(tiny_tower, square_loss, wrap, batches, split_in):
    batch, model = batches.points(6), tiny_tower()
    x = batch["x"].clone().requires_grad_()
    loss = 2 * square_loss(model(batch["x"]), batch["y"])
    loss.backward()
    expected = plain_gradients(model)
    model.zero_grad()
    wrapped = wrap(model, 2)
    for each in (batch["x"], x):
        wrapped.forward_backward(
            (each,), label=batch["y"], loss_fn=square_loss, run_config=split_in(2)
        )
    assert_close(gradients(wrapped), expected)
    assert x.grad is not None
    with torch.no_grad():  # as torch's own graph would not be built either
        wrapped.zero_grad()
        x.grad = None
        wrapped.forward_backward((x,), label=batch["y"], loss_fn=square_loss)
    assert x.grad is None


def test_losses_on_the_host_are_scaled_as_those_on_devices(tiny_tower, square_loss, batches):
    batch, norms = batches.points(6), []
    for wants in (False, True):
        scaler = roundpipe.GradScaler(init_scale=64.0)
        with roundpipe.RoundPipe(tiny_tower(), devices="cpu", grad_scaler=scaler) as wrapped:
            x = batch["x"].clone().requires_grad_(wants)
            loss = wrapped.forward_backward((x,), label=batch["y"], loss_fn=square_loss)
            step = wrapped.step(torch.optim.SGD(wrapped.optim_parameters(), lr=0.1))
            norms.append((loss, step.grad_norm))
    assert_close(*norms)


def test_a_failure_of_the_loss_leaves_nothing_behind(tiny_tower, square_loss, wrap, batches):
    batch, wrapped = batches.points(6), wrap(tiny_tower(), 2)
    x = batch["x"].clone().requires_grad_()

    def fails(*_):
        raise LookupError("no")

    with pytest.raises(LookupError):
        wrapped.forward_backward((x,), label=batch["y"], loss_fn=fails)
    with pytest.raises(roundpipe.ConfigError, match="nothing to step with"):
        wrapped.step(lambda: None)
    wrapped.forward_backward((x,), label=batch["y"], loss_fn=square_loss)
    assert x.grad is not None


class Reads(nn.Module):
    """Reads an argument that no gradient reaches as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, unused):
        return self.linear(x)


def test_an_input_that_is_not_read_gets_none(wrap, batches, square_loss):
    wrapped, batch = wrap(Reads(), 1), batches.points(4)
    x, unused = batch["x"].clone().requires_grad_(), torch.ones(4, 1, requires_grad=True)
    wrapped.forward_backward((x, unused), label=batch["y"], loss_fn=square_loss)
    assert x.grad is not None
    assert unused.grad is None


class Shifts(nn.Module):
    """Reads an argument that is the same for every sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, shift):
        return self.linear(torch.tanh(x + shift))


def test_what_all_microbatches_read_gets_the_sum_of_their_gradients(
    wrap, batches, square_loss, split_in
):
    torch.manual_seed(0)
    model, batch = Shifts(), batches.points(5)
    mine, theirs = (torch.ones(8, requires_grad=True) for _ in range(2))
    square_loss(model(batch["x"], theirs), batch["y"]).backward()
    model.zero_grad()
    wrapped = wrap(model, 2)
    wrapped.forward_backward(
        (batch["x"], mine), label=batch["y"], loss_fn=square_loss, run_config=split_in(3)
    )
    assert_close(mine.grad, theirs.grad)
