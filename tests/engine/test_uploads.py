"""What goes up for generation: every tensor once, packed ones packed, masters over what is old."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.device_model import DeviceModel
from roundpipe.engine.uploads import Upload
from roundpipe.models.sequential import sequential_spec
from roundpipe.plan.actions import Op
from roundpipe.store.build import build_store


class Head(nn.Module):
    """Reads a table that another layer owns."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x @ self.weight.T * self.scale


@pytest.fixture
def tied():
    """A model on a device whose first and last layer share a table, and its host layers."""
    torch.manual_seed(0)
    table = nn.Embedding(6, 4).to(torch.bfloat16)
    spec = sequential_spec(nn.Sequential(table, nn.Linear(4, 4), Head(table)))
    names = [layer.name for layer in spec.layers]
    layers = build_store([layer.tensors for layer in spec.layers], names=names)
    device = CpuDevice()
    yield DeviceModel(device, 0, spec, layers), layers
    device.close()


def brought(model, upload, *, newest=False):
    buffer = torch.zeros(upload.num_bytes, dtype=torch.uint8)
    upload.fill(model, buffer, newest=newest)
    return upload.views(buffer)


def test_a_layer_brings_all_that_it_reads(tied):
    model, layers = tied
    views = brought(model, Upload.of_layer(layers[2]))
    assert set(views) == {"0.weight", "2.scale"}
    assert torch.equal(views["0.weight"], layers[0].tensors["0.weight"])
    assert views["2.scale"] == 2.0
    assert model.traffic.num_bytes[Op.UPLOAD] == layers[2].slot_layout.num_bytes


def test_of_several_layers_a_shared_table_comes_once(tied):
    model, layers = tied
    names = ("0.weight", "2.scale")
    tensors = {name: t for layer in layers for name, t in layer.tensors.items() if name in names}
    extra = torch.arange(6, dtype=torch.int64).view(3, 2).T  # of no layer, and not contiguous
    upload = Upload.of_tensors("outside", {**tensors, "extra": extra}, layers)
    views = brought(model, upload)
    assert upload.num_bytes == 3 * 256
    assert torch.equal(views["0.weight"], layers[0].tensors["0.weight"])
    assert torch.equal(views["extra"], extra)
    assert views["2.scale"] == 2.0


def test_newest_weights_are_what_masters_say_borrowed_ones_too(tied):
    model, layers = tied
    old = layers[0].tensors["0.weight"].detach().clone()
    with torch.no_grad():
        layers[0].masters["0.weight"].add_(1.0)
    for upload in (
        Upload.of_layer(layers[0]),
        Upload.of_layer(layers[2]),
        Upload.of_tensors("outside", {"0.weight": old}, layers),
    ):
        assert torch.equal(brought(model, upload)["0.weight"], old)
        newest = brought(model, upload, newest=True)["0.weight"]
        assert torch.equal(newest, layers[0].newest("0.weight"))
        assert not torch.equal(newest, old)
