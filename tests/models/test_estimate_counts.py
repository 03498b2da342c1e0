"""Counts without weights against the same layers with weights: bytes, trained parameters, work."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.estimate import build, layer_run
from roundpipe.models.estimate.adapter import apply_method
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.method import Lora, Method
from roundpipe.models.spec import Inputs
from roundpipe.store.build import build_store

if TYPE_CHECKING:
    from roundpipe.models.estimate.profile import Profile

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 200
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "tie_word_embeddings": True},
    "qwen3": {**HEADS, "tie_word_embeddings": False},
    "gemma3_text": {
        **(HEADS | WINDOW),
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma2": {**(HEADS | WINDOW)},
    "qwen3_moe": {**(HEADS | EXPERTS), "num_experts": 4},
    "mixtral": {**(HEADS | EXPERTS), "num_local_experts": 4},
    "gpt_oss": {**(HEADS | EXPERTS | WINDOW), "num_local_experts": 4},
}
QUICK = [("llama", "full", 16), ("qwen3", "lora", 32), ("qwen3_moe", "full", 32)]
ALL = [
    pytest.param(kind, method, bits, marks=pytest.mark.accept)
    for kind in ARCHITECTURES
    for method in ("full", "lora")
    for bits in (16, 32)
    if (kind, method, bits) not in QUICK
]


def fields_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **ARCHITECTURES[kind], **more}


@functools.cache
def profile_of(kind: str, name: str = "full", bits: int = 16) -> Profile:
    method = Method(name=name, lora=Lora(r=4))
    return count(make_config(fields_of(kind)), method, name=kind, bits=bits)


def real_model(fields, method, *, bits):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    model = AutoModelForCausalLM.from_config(make_config(fields), dtype=dtype).train()
    apply_method(model, method)
    return model


class Saved:
    """Bytes that autograd saves on the CPU, weights and what is given with every call apart."""

    def __init__(self, outside):
        self.outside = {_key(t) for t in outside}
        self.saved = {}

    def pack(self, tensor):
        if _key(tensor) not in self.outside:
            self.saved[_key(tensor)] = tensor.detach()
        return tensor.detach()

    def num_bytes(self, output, *, is_last):
        if is_last:  # the loss is taken from what the model returns, which lives as long
            self.saved[_key(output.logits)] = output.logits
        else:
            self.saved.pop(_key(output), None)
        return sum(t.untyped_storage().nbytes() for t in self.saved.values())


def _key(tensor):
    return tensor.untyped_storage()._cdata


def run_for_real(model):
    """Yield what every layer keeps and the boundary it reads, on the CPU with data."""
    spec = causal_lm_spec(model)
    ids = torch.randint(3, 300, (BATCH, LENGTH))
    inputs = Inputs((), {"input_ids": ids, "labels": ids})
    calls = spec.make_context(CPU)(inputs, range(len(spec.layers)))
    boundary = None
    for index, layer in enumerate(spec.layers):
        shell = layer.make_shell(CPU)
        shell.bind(layer.tensors)
        call = calls.get(index)
        context = [] if call is None else tree_leaves((call.args, dict(call.kwargs)))
        given = [t for t in [*context, ids] if isinstance(t, torch.Tensor)]
        saved = Saved([*layer.tensors.values(), *shell.parameters.values(), *given])
        leaf = None if boundary is None else boundary.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
            output = shell(leaf, inputs, calls)
        is_last = index == len(spec.layers) - 1
        size = 0 if boundary is None else boundary.numel() * boundary.element_size()
        yield saved.num_bytes(output, is_last=is_last), size
        boundary = output if is_last else output.detach()


@pytest.mark.parametrize(("kind", "method", "bits"), [*QUICK, *ALL])
def test_what_is_kept_for_backward_is_what_autograd_saves(kind, method, bits):
    profile = profile_of(kind, method, bits)
    kinds = profile.kinds(LENGTH)
    at = (BATCH * LENGTH, LENGTH)
    counted = [kinds[layer.kind] for layer in profile.layers]
    method = Method(name=method, lora=Lora(r=4))
    real = run_for_real(real_model(fields_of(kind), method, bits=bits))
    for ours, (kept, boundary) in zip(counted, real, strict=True):
        assert abs(ours.kept.at(*at) - kept) <= 16  # the loss and its divisor
        assert ours.boundary.at(*at) == boundary


def test_peaks_and_calls_are_those_of_layers_with_data(monkeypatch):
    profile = profile_of("llama")
    spec = causal_lm_spec(real_model(fields_of("llama"), Method(), bits=16))
    ids = torch.randint(3, 300, (BATCH, LENGTH))
    inputs = Inputs((), {"input_ids": ids, "labels": ids})
    calls = spec.make_context(CPU)(inputs, range(len(spec.layers)))
    hidden = torch.randn(BATCH, LENGTH, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(layer_run, "META", CPU)
    for index in (1, len(spec.layers) - 1):
        layer, is_last = spec.layers[index], index > 1
        call = None if is_last else {index: calls[index]}
        given = layer_run.Given(hidden, inputs, call, torch.bfloat16, is_last=is_last)
        counted = layer_run.run_layer(layer, layer_run.make_shell(layer), given)
        kind = profile.kinds(LENGTH)[profile.layers[index].kind]
        # Rotary tables have no batch, but count as if they had.
        peak = kind.peak(BATCH * LENGTH, LENGTH)
        assert max(counted.moments) - 16 <= peak <= 1.05 * max(counted.moments)
        assert abs(kind.forward.calls - counted.forward.calls) <= 4
        assert kind.backward.calls == counted.backward.calls


@pytest.mark.parametrize(("kind", "method", "bits"), [*QUICK, *ALL])
def test_sizes_are_those_of_the_store(kind, method, bits):
    profile = profile_of(kind, method, bits)
    method = Method(name=method, lora=Lora(r=4))
    model = real_model(fields_of(kind), method, bits=bits)
    store = build_store([layer.tensors for layer in causal_lm_spec(model).layers])
    for host, sizes in zip(store, [layer.sizes for layer in profile.layers], strict=True):
        assert sizes.own == host.weights.layout.num_bytes
        assert sizes.slot == host.slot_layout.num_bytes
        assert sizes.sums == host.slot_gradient_layout.num_bytes
        assert sizes.own_sums == host.gradient_layout(partial_sums=True).num_bytes
        assert sizes.own_whole == host.gradient_layout(partial_sums=False).num_bytes
        assert sizes.borrows == tuple(owner.index for owner in host.owners)
        assert sizes.shares == host.shares_parameters
        own = [host.tensors[name] for name in host.trainable]
        assert sorted(sizes.trained) == sorted((t.numel(), t.element_size()) for t in own)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*\.1\..*_proj"])
def test_adapters_train_as_many_parameters_as_those_of_peft(kind, targets):
    from peft import LoraConfig, get_peft_model

    fields = fields_of(kind)
    method = Method(name="lora", lora=Lora(r=4, target_modules=targets))
    profile = count(make_config(fields), method, name=kind, regimes=[None])
    plain = AutoModelForCausalLM.from_config(make_config(fields))
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that is about to go
        adapted = get_peft_model(plain, lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert profile.trained_parameters == trained > 0
    assert profile.parameters == sum(p.numel() for p in adapted.parameters())


def test_modules_to_save_are_trained_beside_their_frozen_originals():
    fields = fields_of("qwen3")
    lora = Lora(r=4, modules_to_save=("lm_head",))
    more = count(make_config(fields), Method(name="lora", lora=lora), name="x", regimes=[None])
    less = count(make_config(fields), Method(name="lora", lora=Lora(r=4)), name="x", regimes=[None])
    head = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert more.trained_parameters - less.trained_parameters == head
    assert more.parameters - less.parameters == head


def test_adapters_leave_routed_experts_alone():
    model = real_model(fields_of("qwen3_moe"), Method(name="lora"), bits=16)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("self_attn" in name for name in trained)


def test_adapters_leave_routers_alone():
    linear = functools.partial(torch.nn.Linear, 4, 4)
    layers = {"shared": linear(), "gate": linear(), "gate_proj": linear()}
    model = torch.nn.ModuleDict({**layers, "router": torch.nn.ModuleDict({"layer": linear()})})
    apply_method(model, Method(name="lora", lora=Lora(r=2)))
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"shared", "gate_proj"}


def test_freezing_trains_what_the_patterns_find_and_nothing_below_needs_backward():
    method = Method(name="freeze", unfrozen=(r"layers\.2\.", r"^lm_head"))
    profile = count(make_config(fields_of("qwen3")), method, name="x")
    trained = [bool(layer.sizes.trained) for layer in profile.layers]
    assert trained == [False, False, False, True, True]
    kinds = [layer.kind for layer in profile.layers]
    assert kinds[1] == kinds[2] != kinds[3]
    with pytest.raises(ConfigError, match="no weight is called like nothing"):
        count(
            make_config(fields_of("qwen3")), Method(name="freeze", unfrozen=("nothing",)), name=""
        )


def test_products_are_those_that_pytorch_counts():
    profile = profile_of("llama")
    model = real_model(fields_of("llama"), Method(), bits=16)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    total = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in total.items() if "attention" not in op)
    kinds = profile.kinds(LENGTH)
    ours = sum(
        work.flops.at(BATCH * LENGTH, LENGTH)
        for layer in profile.layers
        for run in (kinds[layer.kind].forward, kinds[layer.kind].backward)
        for sort, work in run.works.items()
        if sort != "attention"
    )
    assert ours == products


def test_attention_counts_half_of_all_pairs_and_backward_two_and_a_half_times_forward():
    profile = profile_of("qwen3", "lora", 32)
    kind = profile.kinds(LENGTH)[profile.layers[1].kind]
    forward = kind.forward.works["attention"].flops.at(BATCH * LENGTH, LENGTH)
    assert forward == 4 * BATCH * 64 * LENGTH**2 / 2
    backward = kind.backward.works["attention"].flops.at(BATCH * LENGTH, LENGTH)
    assert backward == 2.5 * forward


def test_products_with_a_short_side_are_kept_apart():
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 1}
    config = make_config(fields_of("qwen3", **wide))
    profile = count(config, Method(name="lora", lora=Lora(r=4)), name="x")
    works = profile.regimes[0].kinds[1].forward.works
    base = 2 * 256 * 512 + 2 * 256 * 256 + 3 * 256 * 512  # queries and output, keys, values, MLP
    assert works["matrix"].flops.per_token == 2 * base
    sides = 2 * (256 + 512) + 2 * (256 + 256) + 3 * (256 + 512)
    assert works["thin"].flops.per_token == 2 * 4 * sides


def test_experts_count_the_tokens_that_are_sent_to_them():
    profile = profile_of("qwen3_moe", "full", 32)
    kind = profile.kinds(LENGTH)[profile.layers[1].kind]
    tokens = BATCH * LENGTH
    work = kind.forward.works["experts"]
    assert work.flops.at(tokens, LENGTH) == 2 * tokens * 2 * 3 * 64 * 32
    assert work.moved.fixed == pytest.approx(4 * 4 * 3 * 64 * 32, rel=0.01)  # all are read


@pytest.mark.accept
def test_attention_without_a_kernel_takes_length_times_length_unless_fused():
    config = make_config(fields_of("gpt_oss"))
    plain = count(config, Method(), name="x")
    fused = count(config, Method(), name="x", fuse=True)
    assert config._attn_implementation == "eager"
    eager, kernel = (p.kinds(4096)[p.layers[1].kind] for p in (plain, fused))
    assert eager.kept.per_pair > 0
    assert kernel.kept.per_pair == 0
    window = kernel.forward.works["attention"].flops
    assert window.per_pair == 0  # beyond its window a token sees no more
    assert window.per_token > 0


def test_beyond_a_window_nothing_is_skipped_and_a_mask_is_read():
    profile = profile_of("gemma3_text")
    assert [regime.longest for regime in profile.regimes] == [63, None]
    below, above = (profile.kinds(n)[profile.layers[1].kind].forward for n in (32, 4096))
    assert above.works["attention"].flops.per_pair == 2 * below.works["attention"].flops.per_pair
    assert above.works["attention"].moved.per_pair > 0


def test_three_lengths_tell_all_others(monkeypatch):
    profile = profile_of("qwen3_moe", "full", 32)
    monkeypatch.setattr(build, "_LENGTHS", (144, 1280, 2304))
    other = count(make_config(fields_of("qwen3_moe")), Method(), name="x", bits=32)
    for ours, theirs in zip(profile.regimes[0].kinds, other.regimes[0].kinds, strict=True):
        for at in ((512, 512), (3 * 700, 700)):
            assert ours.kept.at(*at) == pytest.approx(theirs.kept.at(*at))
            assert ours.peak(*at) == pytest.approx(theirs.peak(*at), rel=1e-6)


def test_a_model_of_94_layers_and_128_experts_is_one_kind_of_block():
    fields = fields_of("qwen3_moe", num_hidden_layers=94, num_experts=128)
    profile = count(make_config(fields), Method(), name="x")
    assert len(profile.layers) == 96
    assert {layer.kind for layer in profile.layers[1:-1]} == {1}


def test_what_cannot_be_split_is_refused_as_with_weights():
    config = make_config(fields_of("qwen3", num_hidden_layers=0))
    with pytest.raises(ModelError, match="hint: wrap"):
        count(config, Method(), name="x")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "jetmoe", **SIZES, "kv_channels": 16, "num_local_experts": 4},
        {
            **SIZES,
            "model_type": "dbrx",
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 64},
        },
    ],
    ids=lambda fields: fields["model_type"],
)
def test_a_model_that_asks_for_values_is_refused_with_a_way_out(fields):
    with pytest.raises(ModelError, match="depends on values of tensors") as refused:
        count(make_config(fields), Method(), name="x")
    assert "hint: it can be trained all the same" in str(refused.value)
