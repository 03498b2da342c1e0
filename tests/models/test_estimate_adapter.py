"""Adapters without peft: its shapes, and what experts keep when they have adapters or are cut."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.models import grouped
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.estimate.adapter import apply_method
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.method import Lora, Method
from roundpipe.models.routed import ROUTED, is_routed
from roundpipe.models.spec import Inputs

CPU = torch.device("cpu")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
}
KINDS = {"qwen3_moe": {"num_experts": 4}, "gpt_oss": {"num_local_experts": 4}}
LORA = Lora(r=8, target_modules=("q_proj",), target_parameters=STACKS)
# peft asks for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def config_of(kind):
    return make_config({"model_type": kind, **SIZES, **KINDS[kind]})


def real_model(kind, lora=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    if lora is not None:
        apply_method(model, Method(name="lora", lora=lora))
    return model


@functools.cache
def profile_of(lora):
    return count(config_of("qwen3_moe"), Method(name="lora", lora=lora), name="x", bits=32)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_adapters_on_experts_are_those_of_peft(kind):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, target_modules=["q_proj"], target_parameters=list(STACKS))
    theirs = get_peft_model(real_model(kind), settings)
    ours = real_model(kind, LORA)
    shapes = [
        sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)
        for model in (theirs, ours)
    ]
    assert shapes[0] == shapes[1]


def test_a_target_that_no_experts_have_is_refused():
    with pytest.raises(ConfigError, match="target_modules"):
        real_model("qwen3_moe", Lora(target_modules=(), target_parameters=("mlp.gate.weight",)))


def kept_for_real(lora, length):
    """Bytes that autograd saves of block 0's work, beside weights and what it is called with."""
    spec = causal_lm_spec(real_model("qwen3_moe", lora))
    ids = torch.randint(3, 90, (1, length))
    inputs = Inputs((), {"input_ids": ids, "labels": ids})
    calls = spec.make_context(CPU)(inputs, range(len(spec.layers)))
    shells = [layer.make_shell(CPU) for layer in spec.layers[:2]]
    for shell, layer in zip(shells, spec.layers, strict=False):
        shell.bind(layer.tensors)
    hidden = shells[0](None, inputs, calls).detach().requires_grad_()
    given = [t for t in (*calls[1].args, *calls[1].kwargs.values()) if torch.is_tensor(t)]
    given += [t for pair in calls[1].kwargs.values() if isinstance(pair, tuple) for t in pair]
    outside = {t.untyped_storage()._cdata for t in (*shells[1].parameters.values(), *given)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in outside:
            saved[storage._cdata] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = shells[1](hidden, inputs, calls)
    saved.pop(out.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("lora", [LORA, Lora(r=8)], ids=["on experts", "on attention"])
def test_what_is_kept_is_what_autograd_saves_whole_and_in_pieces(lora, monkeypatch):
    monkeypatch.setattr(grouped, "PIECE_BYTES", 2 * 64 * 4 * 2048)  # 2048 tokens
    profile = count(config_of("qwen3_moe"), Method(name="lora", lora=lora), name="x", bits=32)
    kind = profile.kinds(5000)[1]
    assert kind.beyond is not None
    assert kind.beyond[0] == 2048
    for length in (700, 5000):
        assert kind.of(length).kept.at(length, length) == kept_for_real(lora, length)


def test_pieces_take_less_than_the_whole():
    kind = profile_of(LORA).kinds(8192)[1]
    most, pieces = kind.beyond
    assert most == 2**29 // (2 * 64 * 4)
    tokens = 4 * most
    whole = profile_of(Lora(r=8)).kinds(8192)[1]
    assert pieces.kept.at(tokens, 8192) < whole.kept.at(tokens, 8192)
    assert pieces.peak(tokens, 8192) < whole.peak(tokens, 8192)


def test_trained_experts_are_never_cut():
    profile = count(config_of("qwen3_moe"), Method(), name="x", bits=32)
    assert profile.kinds(8192)[1].beyond is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.router.gate", True),
        ("model.layers.0.mlp.router.classifier", True),
        ("model.layers.0.mlp.experts", True),
        ("model.layers.0.mlp.experts.7.up_proj", True),
        ("model.layers.0.mlp.shared_expert_gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.shared_experts.gate_proj", False),
        ("model.layers.0.mlp.shared_expert.up_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
        ("gate", True),
    ],
)
def test_parts_of_a_mixture_that_are_routed_are_known_by_name(name, expected):
    assert is_routed(name) is expected
    assert (re.fullmatch(ROUTED, name) is not None) is expected


def test_a_model_that_reads_the_weight_of_what_it_calls_is_counted_with_adapters():
    layers = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "altup_num_inputs": 2}
    layers |= {"layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 8}
    small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    config = {"model_type": "gemma3n_text", **SIZES, **layers, **small}
    config |= {"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [32, 32]}
    lora = Lora(r=2, target_modules=("prediction_coefs", "correction_coefs"))
    profile = count(make_config(config), Method(name="lora", lora=lora), name="x", bits=32)
    assert profile.trained_parameters > 0
