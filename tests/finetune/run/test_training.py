"""What makes the steps of a run: its optimizer's groups, and the rate of each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.finetune.tiny_model import tiny_model
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from transformers import GptOssConfig, GptOssForCausalLM, Trainer

import roundpipe
from roundpipe.finetune.run.training import Optimizing, Training, make_optimizer

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def gpt_oss() -> nn.Module:
    """Biases of two dimensions, and sinks, which are vectors and no biases."""
    config = GptOssConfig(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return GptOssForCausalLM(config)


def with_magnitudes() -> nn.Module:
    lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(tiny_model(), lora)
    return model


@pytest.mark.parametrize("build", [gpt_oss, with_magnitudes])
def test_what_decays_is_what_decays_with_transformers_trainer(config_of: Any, build: Any) -> None:
    model = build()
    decays = set(Trainer.get_decay_parameter_names(SimpleNamespace(), model))  # type: ignore[arg-type]
    with roundpipe.RoundPipe(model, devices="cpu") as pipe:
        optimizer = make_optimizer(config_of(weight_decay=0.1), pipe)
        names = {id(p): name for name, p in pipe.optim_named_parameters()}
    found = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    trained = set(names.values())
    assert {names[id(p)] for p in found[0.1]} == decays & trained
    assert {names[id(p)] for p in found.get(0.0, [])} == trained - decays
    assert any("sinks" in name or "magnitude" in name for name in decays & trained)


@pytest.mark.parametrize("kind", ["of the step", "of the rate before"])
def test_a_rate_that_was_set_after_a_step_is_that_of_the_next_one(kind: str) -> None:
    def schedule(optimizer: Any) -> Any:
        if kind == "of the step":
            return LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return ExponentialLR(optimizer, 0.5)

    def optimizer_of() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)

    plain = optimizer_of()
    at_once = schedule(plain)
    training = Training.__new__(Training)  # of which only the rate is asked
    late = optimizer_of()
    training.optimizing = Optimizing(late, schedule(late))
    training.scheduler = training.optimizing.scheduler
    training._given = None
    for step in range(1, 6):
        training._tell_scheduler()
        plain.step()
        late.step()
        assert late.param_groups[0]["lr"] == plain.param_groups[0]["lr"], step
        training._given, training._rates = SimpleNamespace(skipped=False), training._rates_now()  # type: ignore[assignment]
        at_once.step()
        if step == 2:  # by a callback, before or after the late scheduler has moved
            plain.param_groups[0]["lr"] = late.param_groups[0]["lr"] = 0.125
        if step == 3:
            training._tell_scheduler()
            plain.param_groups[0]["lr"] = late.param_groups[0]["lr"] = 0.25
