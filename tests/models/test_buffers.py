"""Which buffers of a shell change, and which norms keep running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.buffers import ShellBuffers, statistics_in


def buffers_of(root):
    places = {}
    for name, module in root.named_modules():
        for local in module._buffers:
            places.setdefault(f"{name}.{local}".strip("."), []).append((module._buffers, local))
    return ShellBuffers(places, list(root.modules()))


def test_norms_with_running_statistics_are_known_and_no_others():
    kept = nn.BatchNorm1d(2)
    root = nn.Sequential(
        kept, nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2), nn.GroupNorm(1, 2)
    )
    assert statistics_in(root) == [kept]
    kept.eval()
    assert statistics_in(root) == [kept]  # it may train again


def test_statistics_change_in_training_only():
    root = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    buffers = buffers_of(root)
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert buffers.changing == names
    root.eval()
    assert buffers.changing == set()
    root.train()
    buffers.bind({name: torch.zeros(2) for name in names} | {"other": torch.ones(1)})
    before = buffers.values["1.running_mean"]
    root[1]._buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.long)
    root(torch.randn(3, 2))
    assert "1.running_mean" not in buffers.changed()  # written to past the version counter
    assert before.any()


def test_writing_and_replacing_are_changes_until_something_else_is_hung():
    root = nn.Module()
    root.register_buffer("a", torch.zeros(2))
    root.register_buffer("b", torch.zeros(2))
    buffers = buffers_of(root)
    buffers.bind({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert buffers.changed() == []
    root.a.add_(1)
    root.b = torch.ones(2)
    assert buffers.changed() == ["a", "b"]
    assert buffers.values["b"] is root.b
    buffers.hang({"a": torch.zeros(2)})
    assert buffers.changed() == ["b"]


def test_a_buffer_in_two_places_that_is_replaced_in_one_is_refused():
    root = nn.Sequential(nn.Module(), nn.Module())
    for module in root:
        module.register_buffer("a", torch.zeros(2))
    held = [module._buffers for module in root]
    buffers = ShellBuffers({"a": [(held[0], "a"), (held[1], "a")]}, [])
    buffers.bind({"a": torch.zeros(2)})
    root[0].a.add_(1)
    assert torch.equal(root[1].a, torch.ones(2))  # one tensor in both
    assert torch.equal(buffers.values["a"], torch.ones(2))
    root[0].a = torch.ones(2)
    with pytest.raises(ModelError, match="changed in one of them: a"):
        _ = buffers.values
