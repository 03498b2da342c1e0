"""Layers whose frozen weights lie in a segment of their own, packed or not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.store.build import (
    build_store,
    newest_state,
    relayout,
    require_writable,
    trained_state,
)
from roundpipe.store.frozen import Base
from roundpipe.store.packed import PackedTensor, pack
from roundpipe.store.segment import Layout, Segment


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def base_of(tensors, packed=(), let_go=None):
    """A base as a loader makes it: the file's names, the values in a segment, tensors over it."""
    entries, hows = {}, {}
    for name, tensor in tensors.items():
        if name in packed:
            hows[name], parts = pack(name, tensor.data)
            entries |= parts
            tensor.data = torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)
        else:
            entries[name] = tensor.data
    segment = Segment(Layout.of((n, tuple(t.shape), t.dtype) for n, t in entries.items()))
    for name, value in entries.items():
        segment.views[name].copy_(value)
        if name in tensors and name not in packed:
            tensors[name].data = segment.views[name]
    return Base(segment, tensors, hows, let_go)


@pytest.fixture
def model():
    """A module with adapters; its frozen tensors are called otherwise in the file."""
    torch.manual_seed(0)
    module = nn.Module()
    module.norm = frozen(torch.randn(5).bfloat16())
    module.up = frozen(torch.randn(16, 64).bfloat16())
    module.down = frozen(torch.randn(64, 16).bfloat16())
    module.adapter = nn.Parameter(torch.randn(3, 4))
    module.register_buffer("table", torch.randn(6))
    return module


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def in_file(module):
    return {f"file.{n}": t for n, t in module.named_parameters() if n != "adapter"}


def fill_slot(layer):
    slot = torch.empty(layer.slot_layout.num_bytes, dtype=torch.uint8)
    for piece in layer.upload_pieces():
        slot[piece.offset : piece.offset + piece.num_bytes].copy_(piece.source)
    return layer.slot_layout.view(slot)


def test_what_lies_in_a_base_stays_there_and_follows_the_own_segment_in_a_slot(model):
    expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    base = base_of(in_file(model))
    (layer,) = build_store([tensors_of(model)], bases=[base])
    assert layer.weights.layout.names == ("adapter", "table")
    assert layer.slot_layout.names == ("adapter", "table", "norm", "up", "down")
    assert len(layer.upload_pieces()) == 2
    assert model.up.data_ptr() == base.segment.views["file.up"].data_ptr()
    slot = fill_slot(layer)
    for name, value in expected.items():
        assert torch.equal(slot[name], value), name
        assert torch.equal(layer.newest(name), value), name


def test_a_packed_tensor_is_its_parts_in_the_slot(model):
    expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    base = base_of(in_file(model), packed=["file.up", "file.down"])
    (layer,) = build_store([tensors_of(model)], bases=[base])
    assert "up.scales" in layer.slot_layout.names
    assert len(layer.upload_pieces()) == 2
    slot = fill_slot(layer)
    for name in ("up", "down"):
        how, parts = pack(name, expected[name])
        assert layer.packed[name] == how
        assert torch.equal(PackedTensor(layer.packed[name], slot).unpack(), how.unpack(parts))
        assert torch.equal(layer.newest(name), how.unpack(parts))
    assert torch.equal(slot["norm"], expected["norm"])


def test_a_frozen_tensor_that_is_to_be_trained_moves_out_of_its_base(model):
    expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    base = base_of(in_file(model))
    (layer,) = build_store([tensors_of(model)], bases=[base])
    model.up.requires_grad_()
    assert relayout([layer])
    assert layer.trainable == ("up", "adapter")
    assert layer.held.names == ("norm", "down")
    assert [piece.num_bytes for piece in layer.upload_pieces()[1:]] == [256, 2048]
    slot = fill_slot(layer)
    assert slot.keys() == expected.keys()
    assert all(torch.equal(slot[name], expected[name]) for name in expected)
    model.up.data.zero_()  # its own memory now
    assert base.segment.views["file.up"].any()
    model.up.requires_grad_(False)
    assert relayout([layer])
    assert layer.held.names == ("norm", "down")


def test_bases_of_trained_layers_are_released_one_by_one():
    modules = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    values = [module.weight.detach().clone() for module in modules]
    bases = [base_of({f"file.{i}": module.weight}) for i, module in enumerate(modules)]
    alive = [weakref.ref(base.segment) for base in bases]
    tensors = [{f"{i}.weight": module.weight} for i, module in enumerate(modules)]
    layers = build_store(tensors, bases=bases)
    gc.collect()
    assert bases == []
    assert [ref() for ref in alive] == [None] * 3
    for layer, module, value in zip(layers, modules, values, strict=True):
        assert layer.held is None
        assert torch.equal(module.weight, value)
        assert len(layer.upload_pieces()) == 1


def test_training_packed_weights_is_refused_before_anything_moves(model):
    base = base_of(in_file(model), packed=["file.up"])
    model.up.requires_grad_()
    before = model.adapter.data_ptr()
    with pytest.raises(ModelError, match="4 bits cannot be trained: up\nhint: freeze"):
        build_store([tensors_of(model)], bases=[base])
    assert model.adapter.data_ptr() == before
    model.up.requires_grad_(False)
    (layer,) = build_store([tensors_of(model)], bases=[base])
    model.up.requires_grad_()
    model.adapter.requires_grad_(False)
    with pytest.raises(ModelError, match="4 bits cannot be trained: up"):
        relayout([layer])
    assert layer.trainable == ("adapter",)


def test_a_borrower_uploads_the_parts_of_its_owners_packed_tensor(model):
    base = base_of(in_file(model), packed=["file.up"])
    first, second = build_store([tensors_of(model), {"up": model.up}], bases=[base])
    assert second.packed == {"up": first.packed["up"]}
    assert len(second.upload_pieces()) == 1
    found = PackedTensor(second.packed["up"], fill_slot(second)).unpack()
    assert torch.equal(found, first.newest("up"))


def test_what_was_read_of_a_mapped_base_is_let_go_by_bytes_of_its_segment(model):
    read = []
    base = base_of(in_file(model), let_go=lambda low, high: read.append((low, high)))
    (layer,) = build_store([tensors_of(model)], bases=[base])
    model.up.requires_grad_()
    relayout([layer])
    places = base.segment.layout.by_name
    read.clear()  # what was copied out, too
    own, norm, down = layer.upload_pieces()
    assert own.let_go is None
    norm.let_go(0, 10)
    down.let_go(100, 200)
    assert read == [(0, 10), (places["file.down"].offset + 100, places["file.down"].offset + 200)]


def test_the_state_holds_unpacked_weights_and_what_cannot_be_written_is_refused_by_name(model):
    expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    base = base_of(in_file(model), packed=["file.up"])
    layers = build_store([tensors_of(model)], bases=[base])
    assert trained_state(model, layers).keys() == {"adapter"}
    state = newest_state(model, layers)
    how, parts = pack("up", expected["up"])
    expected["up"] = how.unpack(parts)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    require_writable(model, layers, {"adapter": 0, "norm": 0})
    with pytest.raises(ModelError, match="cannot be loaded into: up"):
        require_writable(model, layers, state)


@pytest.mark.parametrize("let_go", [None, lambda _low, _high: None])
def test_a_tensor_that_was_given_other_memory_has_its_new_values_in_the_slot(model, let_go):
    base = base_of(in_file(model), packed=["file.up"], let_go=let_go)
    old = base.segment.views["file.down"].clone()
    model.down.data = model.down.data + 1  # as adapters do that take their first values out of it
    (layer,) = build_store([tensors_of(model)], bases=[base])
    assert torch.equal(fill_slot(layer)["down"], old + 1)
    assert torch.equal(model.down, old + 1)
    assert layer.held.names == ("norm", "up")
    assert torch.equal(base.segment.views["file.down"], old)


def test_a_mapped_base_is_never_written_to(model):
    base = base_of(in_file(model), let_go=lambda _low, _high: None)
    layers = build_store([tensors_of(model)], bases=[base])
    with pytest.raises(ModelError, match="cannot be loaded into: norm"):
        require_writable(model, layers, {"norm": 0})
