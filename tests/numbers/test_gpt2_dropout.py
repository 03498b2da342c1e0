"""GPT-2 with dropout everywhere for many steps: the draws of plain PyTorch, on any devices."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import roundpipe
from roundpipe.engine.random import layer_seed

SEED = 7
RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
SIZES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 96}


def gpt2(*, tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(**SIZES, **RATES, **tokens, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train()


@contextmanager
def seeded(model, *, step, microbatch):
    """Plain PyTorch, seeded before embeddings and before each block."""

    def seed_before(layer):
        def seed(module, args):
            torch.manual_seed(layer_seed(SEED, step, layer, microbatch))

        return seed

    places = [model.transformer.wte, *model.transformer.h]
    with torch.random.fork_rng(devices=[]):
        hooks = [m.register_forward_pre_hook(seed_before(i)) for i, m in enumerate(places)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@pytest.mark.parametrize(
    ("tied", "steps"),
    [(False, 2), *(pytest.param(t, 20, marks=pytest.mark.accept) for t in (False, True))],
)
def test_steps_with_dropout_equal_a_plain_loop_with_the_same_draws(
    tied, steps, batches, plain, wrap, train_lm, same_bits
):
    """A tied embedding's two gradients add up in another order than in one graph: to 1e-5 then."""
    reference = plain(gpt2(tied=tied))
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    plain_adamw = torch.optim.AdamW(
        reference.model.parameters(), **settings, foreach=False, fused=False
    )
    pipes = [wrap(gpt2(tied=tied), count, seed=SEED) for count in (1, 2, 3)]
    adamws = [roundpipe.optim.AdamW(p.optim_parameters(), **settings) for p in pipes]
    losses = []
    for step in range(steps):
        batch = batches.sequences([9, 14, 5, 7], seed=step)

        def around(microbatch, step=step):
            return seeded(reference.model, step=step, microbatch=microbatch)

        expected = reference.forward_backward(batch, 4, around=around)
        reference.step(plain_adamw, 1.0)
        found = []
        for pipe, adamw in zip(pipes, adamws, strict=True):
            found.append(train_lm(pipe, batch, 4))
            pipe.step(adamw, max_grad_norm=1.0)
        losses.append(expected.item())
        assert len({loss.item() for loss in found}) == 1
        assert found[0].item() == pytest.approx(expected.item(), rel=1e-5 if tied else 0)

    states = [pipe.state_dict() for pipe in pipes]
    same_bits(states[1], states[0])
    same_bits(states[2], states[0])
    if tied:
        for name, value in reference.model.state_dict().items():
            torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-5)
    else:
        same_bits(states[0], reference.model.state_dict())
