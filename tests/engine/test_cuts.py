"""The copies of each chunk: all bytes once, and anew when a layer is laid out anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.engine.cuts import Cuts, chunk_range
from roundpipe.store.build import build_store, relayout


def layers_of(*widths):
    modules = [nn.Linear(width, width) for width in widths]
    chain = nn.Sequential(*modules)
    return modules, build_store(
        [dict(module.named_parameters(f"{at}")) for at, module in enumerate(chain)]
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_chunks_hold_every_byte_of_every_piece_once(count):
    _, store = layers_of(3, 20, 9)
    cuts = Cuts(store)
    size = sum(layer.slot_layout.num_bytes for layer in store)
    slot = torch.zeros(size, dtype=torch.uint8)
    touched = torch.zeros(size, dtype=torch.int64)
    for chunk in range(count):
        low, high = chunk_range(size, chunk, count)
        for cut in cuts.of(range(3), chunk, count):
            assert low <= cut.at
            assert cut.at + cut.source.numel() <= high
            slot.narrow(0, cut.at, cut.source.numel()).copy_(cut.source)
            touched.narrow(0, cut.at, cut.source.numel()).add_(1)
    assert touched.eq(1).all()
    at = 0
    for layer in store:
        for name, view in layer.slot_layout.view(slot, at=at).items():
            assert torch.equal(view, layer.weights.views[name])
        at += layer.slot_layout.num_bytes


def test_cuts_are_made_once_and_again_when_a_layer_moves():
    modules, store = layers_of(4, 4)
    cuts = Cuts(store)
    first = cuts.of(range(2), 0, 2)
    assert cuts.of(range(2), 0, 2) is first
    modules[0].weight.requires_grad_(False)
    assert relayout(store)
    again = cuts.of(range(2), 0, 2)
    assert again is not first
    assert {cut.source.untyped_storage().data_ptr() for cut in again} <= {
        layer.weights.buffer.untyped_storage().data_ptr() for layer in store
    }
