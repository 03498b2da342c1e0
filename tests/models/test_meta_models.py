"""A model on the meta device: refused where it would have to run, enough where it is planned."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe.errors import ModelError
from roundpipe.models.estimate import estimate
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.sim.search import Setting, choose


def on_meta():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_a_model_on_the_meta_device_cannot_be_wrapped_and_is_told_why():
    with pytest.raises(ModelError, match=r"on the meta device, it has no values.*\nhint: load"):
        roundpipe.RoundPipe(on_meta(), devices="cpu")


def test_a_model_on_the_meta_device_can_be_planned_by_its_config():
    model = on_meta()
    card = Card(name="a card", memory_bytes=4 << 30, flops={"bf16": 150e12}, bandwidth=900e9)
    machine = Machine(
        cards=(card,) * 2,
        links=(Link(up=25e9, down=25e9),) * 2,
        host=Host(memory_bytes=64 << 30, bandwidth=100e9),
    )

    costs = estimate(model.config.to_dict(), card)
    plan = choose(Setting(costs=costs, devices=2, machine=machine, microbatches=8))

    assert costs.num_layers == 6 + 2
    held = sum(layer.weight_bytes for layer in costs.layers)
    assert held == pytest.approx(2 * model.num_parameters(), rel=1e-3)
    assert sorted(i for stage in plan.forward for i in stage) == list(range(8))
    assert plan.seconds >= plan.bound_seconds > 0
