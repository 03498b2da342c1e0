"""Weights in 4 bits: the bits of bitsandbytes, few bytes, and back again."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional

from roundpipe.errors import ModelError
from roundpipe.models.estimate.sizes import layer_sizes
from roundpipe.store import packed
from roundpipe.store.packed import PackedTensor, pack, packed_entries
from roundpipe.store.segment import Layout


def weights(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype) * 0.02


@pytest.mark.parametrize("shape", [(48, 64), (3, 40, 64), (7, 33), (5, 13)])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_packing_and_unpacking_have_the_bits_of_bitsandbytes(shape, double, kind):
    tensor = weights(*shape)
    data, state = functional.quantize_4bit(tensor, compress_statistics=double, quant_type=kind)
    expected = functional.dequantize_4bit(data, state)
    how, parts = pack("w", tensor, kind=kind, double=double)
    assert torch.equal(parts["w"], data.view(-1))
    found = how.unpack(parts)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(found, expected)


def test_packing_in_pieces_gives_the_same_bits(monkeypatch):
    tensor = weights(37, 64)
    _, whole = pack("w", tensor)
    monkeypatch.setattr(packed, "_PIECE", 5 * 64)
    _, in_pieces = pack("w", tensor)
    assert all(torch.equal(whole[entry], in_pieces[entry]) for entry in whole)


def test_weights_can_be_unpacked_in_another_dtype_from_the_same_parts():
    how, parts = pack("w", weights(16, 64))
    wide = PackedTensor(how, parts).unpack(torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), how.unpack(parts))


@pytest.mark.parametrize("shape", [(128, 256), (3, 40, 64), (7, 33), (64,), (4, 70_000)])
def test_the_planner_knows_the_entries_and_their_bytes(shape):
    tensor = torch.nn.Parameter(weights(*shape), requires_grad=False)
    how, parts = pack("w", tensor)
    entries = list(packed_entries("w", tensor.numel()))
    assert [(name, tuple(part.shape), part.dtype) for name, part in parts.items()] == entries
    assert list(how.parts.values()) == [name for name, _, _ in entries]
    (sizes,) = layer_sizes([{"w": tensor}], packed={"w"})
    assert sizes.slot == Layout.of(entries).num_bytes
    assert sizes.unpacked == how.num_bytes == tensor.nbytes


@pytest.mark.parametrize(("double", "share"), [(True, 0.27), (False, 0.282)])
def test_a_layer_of_matrices_moves_few_of_its_bytes(double, share):
    shapes = [(256, 256), (512, 256), (256, 512), (8, 128, 256), (8, 256, 64)]
    entries = [
        entry
        for index, shape in enumerate(shapes)
        for entry in packed_entries(str(index), torch.Size(shape).numel(), double=double)
    ]
    whole = sum(2 * torch.Size(shape).numel() for shape in shapes)
    assert Layout.of(entries).num_bytes <= share * whole


def test_values_that_are_not_finite_are_refused_by_name():
    tensor = weights(4, 64)
    tensor[2, 3] = float("nan")
    with pytest.raises(ModelError, match="not finite cannot be packed: some"):
        pack("some.weight", tensor)


@pytest.mark.parametrize("shape", [(64, 96), (4, 64, 96), (10, 192), (3, 32), (65, 33)])
@pytest.mark.parametrize("double", [True, False])
def test_a_last_dimension_that_is_no_multiple_of_the_block_unpacks_right(shape, double):
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, parts = pack("w", weights, double=double)
    error = packed.unpack(parts) - weights
    assert error.norm() / weights.norm() < 0.12  # bitsandbytes alone: 0.28 for the first
