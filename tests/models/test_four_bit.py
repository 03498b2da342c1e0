"""Models that bitsandbytes has packed: taken as they are, run as it trains, or refused by name."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.refusals import refuse_unsupported
from roundpipe.models.sequential import sequential_spec
from roundpipe.models.spec import Inputs
from roundpipe.store.build import build_store, newest_state, require_writable
from roundpipe.store.packed import PackedTensor

CPU = torch.device("cpu")


def linear4bit(size=64, *, compute=torch.bfloat16, state=torch.bfloat16, bias=False, **more):
    torch.manual_seed(0)
    plain = nn.Linear(size, size, bias=bias).to(state)
    settings = {"quant_type": "nf4", **more}
    made = bitsandbytes.nn.Linear4bit(size, size, bias=bias, compute_dtype=compute, **settings)
    made.load_state_dict(plain.state_dict())
    return made.to("cpu").to(state)


def shell_of(module):
    """A shell of a module, bound to a slot that was filled from its host layer, and the latter."""
    (layer,) = sequential_spec(module).layers
    (store,) = build_store([layer.tensors])
    slot = torch.empty(store.slot_layout.num_bytes, dtype=torch.uint8)
    for piece in store.upload_pieces():
        slot[piece.offset : piece.offset + piece.num_bytes].copy_(piece.source)
    views = store.slot_layout.view(slot)
    shell = layer.make_shell(CPU)
    packed = {name: PackedTensor(how, views) for name, how in store.packed.items()}
    shell.bind({**views, **packed})
    return shell, store


def call(shell, x):
    return shell(None, Inputs((x,)), None)


def batch(dtype):
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("compute", "state"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (None, torch.bfloat16),
    ],
)
def test_a_4_bit_layer_gives_the_bits_of_its_own_forward_in_training(
    compute, state, kind, double, bias
):
    more = {"quant_type": kind, "compress_statistics": double, "bias": bias}
    module = linear4bit(compute=compute, state=state, **more)
    plain = linear4bit(compute=compute, state=state, **more)
    shell, _ = shell_of(module.requires_grad_(False))
    ours, theirs = batch(state).requires_grad_(), batch(state).requires_grad_()
    out, expected = call(shell, ours), plain(theirs)
    assert torch.equal(out, expected)
    assert out.dtype == expected.dtype
    out.sum().backward()
    expected.sum().backward()
    if compute in (None, state):  # its own backward rounds to the state's dtype once more
        assert torch.equal(ours.grad, theirs.grad)
    else:
        assert torch.allclose(ours.grad.float(), theirs.grad.float(), rtol=2e-2, atol=1e-2)


def test_evaluation_never_repacks():
    module = linear4bit().requires_grad_(False)
    before = module.weight.data.clone()
    module.eval()
    shell, store = shell_of(module)
    with torch.no_grad():
        first = call(shell, batch(torch.bfloat16))
    assert not getattr(module.weight.quant_state, "packing_format_for_cpu", False)
    assert torch.equal(store.held.parts("weight")["weight"].view(-1, 1), before)
    module.train()
    shell.sync_mode()
    assert torch.equal(call(shell, batch(torch.bfloat16)), first)


def test_the_users_module_reads_the_segment_and_stays_usable():
    module, plain = linear4bit().requires_grad_(False), linear4bit().requires_grad_(False)
    _, store = shell_of(module)
    segment = store.held.base.segment.buffer.untyped_storage().data_ptr()
    state = module.weight.quant_state
    for tensor in (module.weight, state.absmax, state.state2.absmax, state.offset):
        assert tensor.untyped_storage().data_ptr() == segment
    assert module.quant_state is state
    x = batch(torch.bfloat16)
    assert torch.equal(module(x), plain(x))
    theirs = plain.state_dict()
    for name, value in newest_state(module, [store]).items():
        assert torch.equal(value, theirs[name]), name


def test_a_user_who_evaluates_by_hand_changes_nothing_that_is_uploaded():
    module = linear4bit().requires_grad_(False)
    shell, store = shell_of(module)
    before = call(shell, batch(torch.bfloat16))
    repack(module)
    slot = torch.empty(store.slot_layout.num_bytes, dtype=torch.uint8)
    for piece in store.upload_pieces():
        slot[piece.offset : piece.offset + piece.num_bytes].copy_(piece.source)
    views = store.slot_layout.view(slot)
    shell.bind({"weight": PackedTensor(store.packed["weight"], views)})
    assert torch.equal(call(shell, batch(torch.bfloat16)), before)


def repack(module):
    """What evaluation does on a CPU with AVX512."""
    weight = module.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    return module


def not_quantised():
    return bitsandbytes.nn.Linear4bit(8, 8, bias=False)


def with_another_code():
    module = linear4bit()
    module.weight.quant_state.code = module.weight.quant_state.code * 0.5
    return module


def with_a_stray_parameter():
    module = nn.Module()
    module.weight = linear4bit().weight
    return module


CASES = {
    "repacked by bitsandbytes when it ran in evaluation": lambda: repack(linear4bit()),
    "not quantised yet": not_quantised,
    "quantised with a code of its own": with_another_code,
    "weights in 4 bits outside a Linear4bit": with_a_stray_parameter,
    "weights in 8 bits cannot be used": lambda: bitsandbytes.nn.Linear8bitLt(8, 8),
    "an embedding in 4 bits": lambda: bitsandbytes.nn.Embedding4bit(8, 64),
}


@pytest.mark.parametrize("reason", CASES)
def test_it_is_refused_with_its_place_and_a_hint(reason):
    with pytest.raises(ModelError, match=reason) as caught:
        refuse_unsupported(nn.Sequential(nn.Identity(), CASES[reason]()))
    assert ": 1" in str(caught.value)
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "torchao"])
def test_other_quantizers_are_refused_by_name(method):
    module = nn.Linear(2, 2)
    module.hf_quantizer = type("Quantizer", (), {})()
    module.hf_quantizer.quantization_config = type("Config", (), {"quant_method": method})()
    with pytest.raises(ModelError, match=f"not supported: {method}\nhint: load"):
        refuse_unsupported(module)
    module.hf_quantizer.quantization_config.dequantize = True
    refuse_unsupported(module)


def test_training_or_loading_4_bit_weights_is_refused():
    module = linear4bit().requires_grad_(False)
    _, store = shell_of(module)
    with pytest.raises(ModelError, match="cannot be loaded into: weight"):
        require_writable(module, [store], module.state_dict())
    with pytest.raises(ModelError, match="4 bits cannot be trained: weight"):
        store.relayout({"weight"})
