"""Training adapters over weights in 4 bits gives the bits of a plain loop over those weights.

Two ways in: a model that bitsandbytes has packed, beside itself in plain PyTorch; and packed
segments with stand-ins in the model, beside the model with the weights that they unpack to.
"""

from __future__ import annotations

import copy
import weakref

import bitsandbytes
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.device.fake import FakeDevice, Ledger
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.packable import packable
from roundpipe.models.sequential import sequential_spec
from roundpipe.store.build import build_store
from roundpipe.store.frozen import Base, packed_in
from roundpipe.store.packed import PackedTensor, pack
from roundpipe.store.segment import Layout, Segment

BF16 = torch.bfloat16
MANY = [4, 9, 17, 20, 6, 11, 8, 3]


def adapted(model, seed=1, **settings):
    from peft import LoraConfig, get_peft_model

    settings = {"target_modules": ["q_proj", "v_proj"], **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        return get_peft_model(model, config).train()


def with_linear4bit(model, compute):
    """What transformers makes of the linear layers of the blocks under BitsAndBytesConfig."""
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            made = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=compute,
                quant_type="nf4",
            )
            made.load_state_dict(module.state_dict())
            parent, _, local = name.rpartition(".")
            setattr(model.model.get_submodule(parent), local, made.to("cpu"))
    return model.requires_grad_(False)


@pytest.fixture
def bnb_llama():
    def make(dtype=torch.float32):
        return adapted(with_linear4bit(wide_llama(dtype), dtype))

    return make


def packed_twins(model):
    """A model over packed bases, and a copy of it over the weights that they unpack to."""
    plain = copy.deepcopy(model)
    bases = []
    pairs = zip(model.model.layers, plain.model.layers, strict=True)
    for index, (mine, theirs) in enumerate(pairs):
        names = {id(p): name for name, p in mine.named_parameters()}
        parts, hows, tensors = {}, {}, {}
        for parameter in packable(mine):
            name = names[id(parameter)]
            entry = f"{index}.{name}"
            hows[entry], made = pack(entry, parameter.data)
            theirs.get_parameter(name).data = hows[entry].unpack(made)
            parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(
                parameter.shape
            )
            parts |= made
            tensors[entry] = parameter
        segment = Segment(Layout.of((n, tuple(p.shape), p.dtype) for n, p in parts.items()))
        for name, part in parts.items():
            segment.views[name].copy_(part)
        bases.append(Base(segment, tensors, hows))
    return model.requires_grad_(False), bases, plain.requires_grad_(False)


@pytest.fixture
def wrap_over(wrap):
    """``wrap_over(bases, model, …)``: a RoundPipe whose frozen weights lie in bases."""

    def make(bases, model, *args, **more):
        return wrap(model, *args, bases=list(bases), **more)

    return make


def qwen3_moe(dtype=torch.float32):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=96,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config).to(dtype).train()


def wide_llama(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).train()


MODELS = {"dense": wide_llama, "experts": qwen3_moe}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_adapters_on_a_bitsandbytes_model_get_its_own_gradients(
    num_devices, dtype, bnb_llama, batches, plain, wrap, train_lm, same_bits
):
    batch = batches.sequences(MANY)
    expected = plain(bnb_llama(dtype))
    loss = expected.forward_backward(batch, 4)
    wrapped = wrap(bnb_llama(dtype), num_devices)
    assert train_lm(wrapped, batch, 4).item() == loss.item()
    same_bits(wrapped.gradients(), expected.gradients())


@pytest.fixture
def _no_progress():
    """A bar of transformers leaves a thread that watches it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.usefixtures("_no_progress")
def test_a_model_that_transformers_packed_is_taken_as_it_is(
    tmp_path, batches, plain, wrap, train_lm, same_bits
):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    wide_llama(BF16).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=BF16,
    )
    made = [
        AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=BF16, quantization_config=settings, device_map="cpu"
        )
        for _ in range(2)
    ]
    expected, model = plain(adapted(made[0])), adapted(made[1])
    batch = batches.sequences(MANY)
    loss = expected.forward_backward(batch, 4)
    wrapped = wrap(model, 2)
    assert train_lm(wrapped, batch, 4).item() == loss.item()
    same_bits(wrapped.gradients(), expected.gradients())


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_over_packed_segments_equal_a_plain_loop_over_the_unpacked_weights(
    kind, grain, batches, plain, wrap_over, train_lm, close_to
):
    # bit for bit where nothing runs in grouped products, which add up in an order of their own
    tolerance = {"dense": 0.0, "experts": 1e-5}[kind]
    model, bases, twin = packed_twins(MODELS[kind]())
    batch = batches.sequences(MANY)
    expected = plain(adapted(twin))
    wrapped = wrap_over(bases, adapted(model), 2)
    theirs = torch.optim.AdamW(
        [p for p in expected.model.parameters() if p.requires_grad], lr=1e-2, foreach=False
    )
    ours = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    for _ in range(2):
        loss = expected.forward_backward(batch, 4)
        found = train_lm(wrapped, batch, 4, recompute_grain=grain)
        assert found.item() == pytest.approx(loss.item(), rel=tolerance, abs=0)
        close_to(wrapped.gradients(), expected.sums, tolerance)
        wrapped.step(ours)
        expected.step(theirs)
        copied = {n: p.data for n, p in expected.model.named_parameters() if p.requires_grad}
        state = wrapped.state_dict()
        with torch.no_grad():  # the same weights, whatever the optimizers' last bits
            for name, parameter in copied.items():
                assert torch.allclose(parameter, state[name], atol=1e-5)
                parameter.copy_(state[name])


def test_adapters_on_packed_stacked_experts_get_the_gradients_of_the_unpacked_ones(
    batches, plain, wrap_over, train_lm, close_to
):
    model, bases, twin = packed_twins(qwen3_moe())
    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    batch = batches.sequences(MANY)
    expected = plain(adapted(twin, **targets))
    loss = expected.forward_backward(batch, 4)
    wrapped = wrap_over(bases, adapted(model, **targets), 2)
    assert train_lm(wrapped, batch, 4).item() == pytest.approx(loss.item(), rel=1e-6)
    # x(W + AB) is summed as xW + (xA)B
    close_to(wrapped.gradients(), expected.gradients(), 1e-5)


def test_steps_over_packed_weights_have_no_race(bnb_llama, batches, wrap, train_lm, same_bits):
    batch = batches.sequences(MANY)
    found = []
    for devices in (fakes(2), 2):
        wrapped = wrap(bnb_llama(), devices)
        optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
        for _ in range(2):
            train_lm(wrapped, batch, 3)
            wrapped.step(optimizer)
        found.append(wrapped.state_dict())
    same_bits(*found)


def fakes(count):
    ledger = Ledger()
    return [FakeDevice(f"fake{i}", ledger=ledger, watch_storage=True) for i in range(count)]


def test_train_evaluate_train_equals_train_train(bnb_llama, batches, wrap, train_lm, same_bits):
    first, second = batches.sequences(MANY), batches.sequences(MANY, seed=1)
    found = []
    for evaluates in (False, True):
        wrapped = wrap(bnb_llama(BF16), 2)
        optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
        train_lm(wrapped, first, 4)
        wrapped.step(optimizer)
        if evaluates:
            wrapped.eval()
            with torch.no_grad():
                losses = [wrapped(**second).loss.item() for _ in range(2)]
            assert losses[0] == losses[1]
            wrapped.train()
        train_lm(wrapped, second, 4)
        found.append({name: g.clone() for name, g in wrapped.gradients().items()})
        wrapped.close()
        assert torch.isfinite(wrapped.model.eval()(**second).loss)
    same_bits(*found)


@pytest.mark.parametrize("kind", MODELS)
def test_the_split_of_a_packed_model_is_checked_with_its_real_weights(kind, monkeypatch):
    model, bases, twin = packed_twins(MODELS[kind]())
    alive, most = [], 0
    unpack = PackedTensor.unpack

    def noted(self, dtype=None):
        nonlocal most
        weights = unpack(self, dtype)
        alive.append((self.packed.parts["data"], weakref.ref(weights.untyped_storage())))
        most = max(most, len({n.split(".")[0] for n, ref in alive if ref() is not None}))
        return weights

    monkeypatch.setattr(PackedTensor, "unpack", noted)
    spec = causal_lm_spec(model, packed_in(bases))
    assert len({name for name, _ in alive}) == sum(len(base.packed) for base in bases)
    assert most == 1  # block's weights at a time
    assert len(spec.layers) == len(causal_lm_spec(twin).layers)
    assert all(p.isnan().all() for base in bases for p in base.tensors.values())


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_packed_block_moves_at_most_27_hundredths_of_its_matrices_in_bf16(kind):
    wide = {"dense": {}, "experts": {"experts": 8}}[kind]
    block = big_block(**wide)
    entries = {name: p for name, p in block.named_parameters() if p.dim() >= 2}
    parts = {}
    hows = {}
    for name, parameter in entries.items():
        hows[name], made = pack(name, parameter.data)
        parts |= made
    segment = Segment(Layout.of((n, tuple(p.shape), p.dtype) for n, p in parts.items()))
    (layer,) = sequential_spec(nn.Sequential(block)).layers
    tensors = dict(zip(entries, (layer.tensors[f"0.{n}"] for n in entries), strict=True))
    (store,) = build_store([layer.tensors], bases=[Base(segment, tensors, hows)])
    moved = sum(piece.num_bytes for piece in store.upload_pieces())
    assert moved == store.slot_layout.num_bytes
    assert moved <= 0.27 * sum(2 * p.numel() for p in entries.values())


def big_block(experts=0):
    block = nn.Module().requires_grad_(False)
    block.q = nn.Linear(512, 512, bias=False)
    block.up = nn.Linear(512, 1024, bias=False)
    block.norm = nn.Parameter(torch.ones(512))
    if experts:
        block.stack = nn.Parameter(torch.randn(experts, 256, 512))
    return block.requires_grad_(False).to(BF16)
