"""What a microbatch weighs: by layer, each storage once, weights not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.engine.weigh import Scale, Sizes
from roundpipe.models.sequential import sequential_spec
from roundpipe.models.spec import Inputs
from roundpipe.store.packed import PackedTensor, pack

X = torch.randn(4, 8)  # 128 bytes


def weigh(*layers, grad=True, own=()):
    """Sizes of a chain of callables, the last of which makes a loss of it."""
    sizes = Sizes()
    scale = Scale(sizes, own)
    value = X.clone().requires_grad_()
    with torch.set_grad_enabled(grad):
        for number, layer in enumerate(layers):
            with scale.layer(number, value if number else None):
                value = layer(value)
    return sizes, value


def test_what_one_layer_saves_of_its_output_the_next_does_not_save_again():
    sizes, _ = weigh(torch.tanh, torch.sin, torch.cos)
    # tanh saves its output, which sin reads and saves too; sin's output is saved by cos.
    assert sizes.kept == {0: 128, 1: 0, 2: 128}
    assert sizes.largest == {0: 128, 1: 0, 2: 128}
    assert sizes.boundary == {1: 128, 2: 128}


def test_weights_in_their_slot_are_not_counted():
    slot = torch.zeros(1024, dtype=torch.uint8)
    linear = nn.Linear(8, 8, bias=False)
    loose, _ = weigh(linear)
    linear.weight.data = slot.narrow(0, 256, 256).view(torch.float32).view(8, 8)
    bound, _ = weigh(linear, own=(slot, None))
    assert (loose.kept[0], bound.kept[0]) == (128 + 256, 128)


def test_packed_weights_are_not_counted_and_what_else_a_layer_keeps_is():
    linear = nn.Linear(8, 64, bias=False).requires_grad_(False)
    (layer,) = sequential_spec(nn.Sequential(linear)).layers
    shell = layer.make_shell(torch.device("cpu"))
    how, parts = pack("0.weight", linear.weight)
    shell.bind({"0.weight": PackedTensor(how, parts)})
    sizes, _ = weigh(lambda x: shell(None, Inputs((x.sin(),)), None).tanh())
    assert sizes.kept == {0: 128 + 1024}  # what sin read, what tanh gave
    assert sizes.largest == {0: 1024}


def test_a_view_counts_as_the_storage_that_it_keeps():
    sizes, _ = weigh(lambda x: torch.sin(torch.cat([x, x])[:1]))
    assert sizes.kept == {0: 256}


def test_without_gradient_only_boundaries_are_weighed():
    sizes, _ = weigh(torch.tanh, torch.sin, grad=False)
    assert (sizes.kept, sizes.boundary) == ({}, {1: 128})


def test_parts_of_a_layer_add_up_and_the_heaviest_microbatch_counts():
    sizes = Sizes()
    for rows in (4, 2):
        scale, value = Scale(sizes, ()), torch.randn(rows, 8).requires_grad_()
        with scale.layer(0):
            value = torch.sin(value)
        with scale.layer(0):
            torch.sin(value)
    assert sizes.kept == {0: 256}


@pytest.mark.parametrize("seed", range(3))
def test_weighing_changes_no_gradient(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
    gradients = []
    for is_weighed in (False, True):
        model.zero_grad()
        loss = (weigh(model)[1] if is_weighed else model(X.clone().requires_grad_())).square().sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
