"""Mixtures of experts train to the same bits on any devices, and to plain PyTorch's where exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.models import grouped


def mixture(*, adapters=False, layers=2):
    """A tiny Qwen3-MoE in training mode; with adapters on attention and on all experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).train()
        if not adapters:
            return model
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        settings = LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=names
        )
        model = get_peft_model(model, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: no gradient would reach the other factor
                nn.init.normal_(parameter, std=0.1)
        return model


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def in_pieces(request, monkeypatch):
    """Whether a microbatch makes one piece or several."""
    if request.param:
        monkeypatch.setattr(grouped, "PIECE_BYTES", 6 * 2 * 32 * 4)
    return request.param


def trained(wrapped, train_lm, batches, steps=2):
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    losses = []
    for seed in range(steps):
        losses.append(train_lm(wrapped, batches.sequences([9, 14, 5, 7], seed=seed), 4).item())
        wrapped.step(optimizer, max_grad_norm=1.0)
    return losses, wrapped.state_dict()


@pytest.mark.usefixtures("in_pieces")
def test_adapters_on_experts_give_the_same_bits_on_one_two_and_three_devices(
    wrap, train_lm, batches, same_bits
):
    runs = [trained(wrap(mixture(adapters=True), n), train_lm, batches) for n in (1, 2, 3)]
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        same_bits(state, runs[0][1])


def test_adapters_on_experts_train_as_in_plain_peft(in_pieces, wrap, train_lm, batches, plain):
    reference = plain(mixture(adapters=True))
    optimizer = torch.optim.AdamW([p for p in reference.model.parameters() if p.requires_grad])
    wrapped = wrap(mixture(adapters=True), 2)
    ours = roundpipe.optim.AdamW(wrapped.optim_parameters())
    for seed in range(2):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected = reference.forward_backward(batch, 4)
        torch.testing.assert_close(train_lm(wrapped, batch, 4), expected, rtol=1e-5, atol=1e-6)
        norm = reference.step(optimizer, 1.0)
        found = wrapped.step(ours, max_grad_norm=1.0).grad_norm
        torch.testing.assert_close(found.item(), norm.item(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_trained_experts_equal_a_plain_loop_bit_for_bit(
    devices, wrap, train_lm, batches, plain, same_bits
):
    reference, wrapped = plain(mixture()), wrap(mixture(), devices)
    optimizer = torch.optim.AdamW(reference.model.parameters(), foreach=False, fused=False)
    ours = roundpipe.optim.AdamW(wrapped.optim_parameters())
    for seed in range(2):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected = reference.forward_backward(batch, 4)
        assert torch.equal(train_lm(wrapped, batch, 4), expected)
        reference.step(optimizer, 1.0)
        wrapped.step(ours, max_grad_norm=1.0)
    same_bits(wrapped.state_dict(), reference.model.state_dict())
