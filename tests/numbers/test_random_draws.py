"""Dropout draws the same whoever runs a layer, when and how often: as plain PyTorch can too."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe.engine.random import layer_seed

SEED = 1234


@contextmanager
def seeded(layers, *, call, microbatch):
    """Plain PyTorch, seeded before each of ``layers`` (by number) runs."""

    def seed_before(layer):
        def seed(module, args):
            torch.manual_seed(layer_seed(SEED, call, layer, microbatch))

        return seed

    with torch.random.fork_rng(devices=[]):
        hooks = [module.register_forward_pre_hook(seed_before(i)) for i, module in layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def plain_tower(tiny_tower, plain, square_loss, batch, call):
    """Loss and gradients of one call in four microbatches."""
    reference = plain(tiny_tower(dropout=0.3), square_loss)
    layers = dict(enumerate(reference.model))

    def around(microbatch):
        return seeded(layers, call=call, microbatch=microbatch)

    loss = reference.forward_backward(batch, 4, around=around)
    return loss, reference.gradients()


PLANS = {
    "planned": {},
    "recompute by layer": {"recompute_grain": "layer"},
    "no recompute": {
        "execute_plan": roundpipe.ModelExecutePlan(fwd_plan=[], bwd_plan=[range(6)]),
    },
    "a stage a layer": {
        "execute_plan": roundpipe.ModelExecutePlan(
            fwd_plan=[range(i, i + 1) for i in range(5)],
            bwd_plan=[range(i, i + 1) for i in reversed(range(6))],
        ),
    },
}


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_dropout_equals_plain_pytorch_on_any_devices_and_with_any_recompute(
    plan, num_devices, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    batch = batches.points(7)
    wrapped = wrap(tiny_tower(dropout=0.3), num_devices, seed=SEED)
    losses = []
    for call in range(3):  # the third is planned from measured times
        loss, gradients = plain_tower(tiny_tower, plain, square_loss, batch, call)

        losses.append(train_xy(wrapped, batch, square_loss, 4, **PLANS[plan]))

        assert torch.equal(losses[-1], loss)
        same_bits(wrapped.gradients(), gradients)
        wrapped.zero_grad()
    assert len({loss.item() for loss in losses}) == 3  # each call draws anew


@pytest.mark.parametrize("num_devices", [1, 2])
def test_attention_dropout_of_a_causal_lm_equals_plain_pytorch(
    num_devices, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    batch = batches.sequences([9, 14, 5])
    reference = plain(tiny_llama(attention_dropout=0.2))
    blocks = {1 + i: block for i, block in enumerate(reference.model.model.layers)}
    loss = reference.forward_backward(
        batch, 3, around=lambda microbatch: seeded(blocks, call=0, microbatch=microbatch)
    )
    wrapped = wrap(tiny_llama(attention_dropout=0.2), num_devices, seed=SEED)

    assert torch.equal(train_lm(wrapped, batch, 3), loss)
    same_bits(wrapped.gradients(), reference.gradients())


def test_dropout_behind_an_embedding_equals_plain_pytorch(batches, plain, wrap, train_lm, close_to):
    """GPT-2 draws in its first layer too, and where its context is worked out nothing is drawn."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
        rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))

    batch = batches.sequences([9, 14, 5])
    reference = plain(gpt2().train())
    inner = reference.model.transformer
    layers = {0: inner.wte, **{1 + i: block for i, block in enumerate(inner.h)}}
    loss = reference.forward_backward(
        batch, 3, around=lambda microbatch: seeded(layers, call=0, microbatch=microbatch)
    )
    wrapped = wrap(gpt2().train(), 2, seed=SEED)
    state = torch.get_rng_state()

    assert torch.equal(train_lm(wrapped, batch, 3), loss)
    close_to(wrapped.gradients(), reference.sums)  # its embedding is tied
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluating_in_between_does_not_change_what_training_draws(
    batches, tiny_tower, square_loss, wrap, train_xy
):
    """A plain loop in evaluation mode draws nothing either."""
    batch = batches.points(7)

    def losses(*, evaluates):
        wrapped = wrap(tiny_tower(dropout=0.3), 2, seed=SEED)
        sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-3)
        found = []
        for _ in range(3):
            found.append(train_xy(wrapped, batch, square_loss, 4).item())
            wrapped.step(sgd)
            if evaluates:
                wrapped.eval()
                with torch.no_grad():
                    wrapped(batch["x"])
                wrapped.train()
        return found

    assert losses(evaluates=True) == losses(evaluates=False)


def test_the_callers_random_state_is_left_alone(batches, tiny_tower, square_loss, wrap, train_xy):
    wrapped = wrap(tiny_tower(dropout=0.3), 2)
    state = torch.get_rng_state()

    train_xy(wrapped, batches.points(7), square_loss, 4)
    wrapped.synchronize()

    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_is_torchs_unless_given(batches, tiny_tower, square_loss, wrap, train_xy):
    def loss(**settings):
        wrapped = wrap(tiny_tower(dropout=0.3), 1, **settings)
        return train_xy(wrapped, batches.points(7), square_loss, 4).item()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        by_torch = loss()
        torch.manual_seed(SEED + 1)
        other = loss()

    assert by_torch == loss(seed=SEED)
    assert other == loss(seed=SEED + 1)
    assert by_torch != other


def test_modes_of_submodules_are_followed(batches, tiny_tower, square_loss, wrap, train_xy, plain):
    """``eval()`` of the whole or of a part switches dropout off, ``train()`` on again."""
    batch = batches.points(7)
    model = tiny_tower(dropout=0.3)
    wrapped = wrap(model, 2, seed=SEED)
    without = plain(tiny_tower(), square_loss).forward_backward(batch, 4)

    def run():
        loss = train_xy(wrapped, batch, square_loss, 4)
        wrapped.zero_grad()
        return loss

    assert not torch.equal(run(), without)
    wrapped.eval()
    assert torch.equal(run(), without)
    wrapped.train()
    assert not torch.equal(run(), without)
    for block in list(model)[1:-1]:
        block.drop.eval()
    assert torch.equal(run(), without)
    model[2].drop.train()
    assert not torch.equal(run(), without)


class RecomputingByItself(nn.Module):
    """Dropout within ``torch.utils.checkpoint``: it draws again in backward."""

    def __init__(self, rate):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(rate)

    def inner(self, x):
        return self.dropout(self.linear(x))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_layer_that_recomputes_by_itself_and_draws_is_refused(grain):
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    chain = nn.Sequential(*[RecomputingByItself(0.5) for _ in range(3)])

    def train(model):
        model.forward_backward((x,), loss_fn=lambda y, _: y.mean(), run_config=config)
        model.synchronize()

    said = pytest.raises(roundpipe.StepError, match=r"(?s)in its backward.*recompute_grain")
    with roundpipe.RoundPipe(chain, devices=["cpu"]) as model, said:
        train(model)


def test_a_layer_that_recomputes_by_itself_and_draws_nothing_trains():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    chain = nn.Sequential(*[RecomputingByItself(0.0) for _ in range(3)])
    with roundpipe.RoundPipe(chain, devices=["cpu"]) as model:
        model.forward_backward((x,), loss_fn=lambda y, _: y.mean())
        model.synchronize()
        assert all(gradient is not None for gradient in model.gradients().values())
