"""Profiles as costs: bytes per parameter against the store's own, and what a job changes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.estimate import Job, Method, costs, disk, estimate, profile
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.costs import ALIGNMENT
from roundpipe.optim.adamw import AdamW
from roundpipe.plan.cards import card_named
from roundpipe.plan.machine import Card
from roundpipe.store import segment
from roundpipe.store.build import build_store

CARD = Card(
    name="a card",
    memory_bytes=24 << 30,
    flops={"fp32": 50e12, "bf16": 150e12, "fp16": 150e12, "fp16_fp16": 230e12},
    bandwidth=900e9,
)
FIELDS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


def total(found, name):
    return sum(getattr(layer, name) for layer in found.layers)


def real_bytes(store, optimizer):
    """Pinned and pageable bytes of a store whose gradients and moments have been made."""
    pinned, pageable = 0, 0
    for layer in store:
        gradients = layer.gradients(partial_sums=layer.shares_parameters)
        pinned += layer.weights.layout.num_bytes + gradients.layout.num_bytes
        if layer.shares_parameters:
            pinned += layer.slot_gradient_layout.num_bytes
        for name, master in layer.masters.items():
            if not layer.is_alias(name):
                size = master.numel() * master.element_size()
                pageable += -(-size // segment.ALIGNMENT) * segment.ALIGNMENT
            state = optimizer.state[master]
            pageable += sum(value.nbytes for key, value in state.items() if key != "step")
    return pinned, pageable


@pytest.mark.parametrize(
    ("dtype", "optim_dtype", "moments", "tied"),
    [
        ("bf16", None, None, False),
        ("fp32", None, "bf16", True),
        ("bf16", "bf16", None, True),
        ("bf16", "bf16", "int8", False),
    ],
)
def test_host_bytes_are_those_of_the_store(dtype, optim_dtype, moments, tied):
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    config = make_config({**FIELDS, "tie_word_embeddings": tied})
    job = Job(dtype=dtype, optim_dtype=optim_dtype, moments_dtype=moments, length=64)
    found = costs(count(config, Method(), name="x", bits=job.bits), CARD, job)
    model = AutoModelForCausalLM.from_config(config, dtype=dtypes[dtype])
    store = build_store(
        [layer.tensors for layer in causal_lm_spec(model).layers], optim_dtype=dtypes[optim_dtype]
    )
    masters = [master for layer in store for master in layer.masters.values()]
    optimizer = AdamW(masters, state_dtype=moments or "fp32")
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    pinned, pageable = real_bytes(store, optimizer)
    assert total(found, "pinned_bytes") == pinned
    # a scale is of 256 moments, or of what is left of them
    scales = 2 * 4 * len(masters) if moments == "int8" else 0
    assert 0 <= pageable - total(found, "pageable_bytes") <= scales


def test_a_trained_weight_takes_16_bytes_and_moves_28():
    found = estimate("meta-llama/Llama-3.1-8B", CARD)
    parameters = 8030261248
    host = total(found, "pinned_bytes") + total(found, "pageable_bytes")
    assert host == pytest.approx(16 * parameters, rel=1e-4)
    assert total(found, "update_bytes") == 28 * parameters
    assert total(found, "publish_bytes") == 6 * parameters
    assert total(found, "weight_bytes") == pytest.approx(2 * parameters, rel=1e-4)
    assert total(found, "gradient_bytes") == pytest.approx(4 * parameters, rel=1e-4)
    assert total(found, "download_bytes") == pytest.approx(2 * parameters, rel=1e-4)


def test_partial_sums_take_18_bytes_and_a_place_for_each_visit():
    job = Job(backward_visits=4)
    found = estimate("Llama-3.1-8B", CARD, job=job)
    host = total(found, "pinned_bytes") + total(found, "pageable_bytes")
    assert host == pytest.approx((18 + 4 * 4) * 8030261248, rel=1e-4)
    assert total(found, "update_bytes") == 30 * 8030261248


@pytest.mark.parametrize(
    ("changes", "per_parameter", "moved"),
    [
        ({"moments_dtype": "bf16"}, 12.0, 20),
        ({"moments_dtype": "int8"}, 8 + 2 * (1 + 4 / 256), 12 + 4 * (1 + 4 / 256)),
        ({"optim_dtype": "bf16"}, 14.0, 26),
        ({"optim_dtype": "bf16", "moments_dtype": "bf16"}, 10.0, 18),
        ({"optim_dtype": "bf16", "moments_dtype": "int8"}, 8 + 8 / 256, 14 + 16 / 256),
        ({"optim_dtype": "bf16", "moments_dtype": "bf16", "staleness": 1}, 12.0, 18),
        ({"staleness": 1}, 16.0, 28),
    ],
)
def test_dtypes_of_the_optimizer_change_memory_and_traffic(changes, per_parameter, moved):
    found = estimate("Llama-3.1-8B", CARD, job=replace(Job(), **changes))
    host = total(found, "pinned_bytes") + total(found, "pageable_bytes")
    assert host == pytest.approx(per_parameter * 8030261248, rel=1e-4)
    assert total(found, "update_bytes") == pytest.approx(moved * 8030261248, rel=1e-4)


def test_adapters_on_4_bit_weights_are_small_and_take_longer():
    lora, qlora = (estimate("Llama-3.1-8B", CARD, method=name) for name in ("lora", "qlora"))
    blocks = range(1, 33)
    elements = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    less = sum(lora.layers[i].weight_bytes - qlora.layers[i].weight_bytes for i in blocks)
    assert less == pytest.approx((2 - 0.5 - 1 / 64 - 4 / (64 * 256)) * elements, rel=1e-3)
    assert total(lora, "gradient_bytes") == total(qlora, "gradient_bytes")
    for i in blocks:
        assert qlora.layers[i].forward_seconds > lora.layers[i].forward_seconds
        # a forward has all of its layer's weights unpacked
        assert qlora.layers[i].peak_bytes - lora.layers[i].peak_bytes == 2 * elements // 32
    assert lora.owners == frozenset(blocks)
    assert lora.first_trainable == 1


def test_a_tied_head_borrows_the_embedding():
    found = estimate("Qwen/Qwen3-1.7B", CARD)
    assert found.layers[-1].borrows == (0,)
    assert found.layers[-1].weight_bytes > found.layers[0].weight_bytes
    assert found.layers[-1].download_bytes == found.layers[-1].gradient_bytes
    assert 0 in found.owners


def test_length_and_microbatch_grow_activations_in_proportion():
    model = profile("Llama-3.1-8B")
    one = costs(model, CARD, Job(length=4096)).layers[1]
    four = costs(model, CARD, Job(length=4096, microbatch_size=4)).layers[1]
    longer = costs(model, CARD, Job(length=16384)).layers[1]
    assert four.activation_bytes == 4 * one.activation_bytes == longer.activation_bytes
    assert four.boundary_bytes == 4 * 4096 * 4096 * 2
    assert longer.forward_seconds > four.forward_seconds  # attention grows with the square
    assert one.weight_bytes == four.weight_bytes


def test_a_card_without_the_dtype_says_which_it_has():
    with pytest.raises(ConfigError, match="does not compute in bf16\nhint: dtype=fp32, fp16"):
        estimate("Llama-3.1-8B", card_named("T4").at_work())
    with pytest.raises(ConfigError, match="fp16_accumulation needs fp16"):
        Job(fp16_accumulation=True)
    with pytest.raises(ConfigError, match="length must be at least 1: 0"):
        Job(length=0)
    with pytest.raises(ConfigError, match="unknown dtype: fp8"):
        Job(dtype="fp8")


def test_a_checkpoint_holds_what_is_trained_and_its_state():
    full = disk(profile("Llama-3.1-8B"), Job(), save_total_limit=2)
    assert full.download == 2 * 8030261248
    assert full.checkpoint == pytest.approx(14 * 8030261248, rel=1e-4)
    assert full.total == full.download + 3 * full.checkpoint + full.result
    model = profile("Llama-3.1-8B", "lora")
    lora = disk(model, Job())
    assert lora.download == full.download
    assert lora.result == 2 * model.trained_parameters
    assert lora.checkpoint == pytest.approx(14 * model.trained_parameters, rel=1e-3)


def test_alignment_is_that_of_the_store():
    assert ALIGNMENT == segment.ALIGNMENT


def test_estimating_a_known_model_imports_no_torch():
    code = (
        "import sys\n"
        "from roundpipe.models.estimate import profile\n"
        "assert profile('qwen3-32b', 'qlora').trained_parameters\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
