"""Packed weights in a shell: there while the layer runs, made again for backward, never kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.models.sequential import sequential_spec
from roundpipe.models.spec import Inputs
from roundpipe.store.packed import PackedTensor, pack

CPU = torch.device("cpu")


class Experts(nn.Module):
    """Stacked experts between two matrices: three uses of frozen weights, one of them by parts."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.stack = nn.Parameter(torch.randn(4, width, width) / 8)
        self.last = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        for parameter in (*self.first.parameters(), self.stack, self.last.weight):
            parameter.requires_grad_(False)

    def forward(self, x):
        x = self.first(x * self.scale).tanh()
        parts = [x[:, i::4] @ self.stack[i] for i in range(4)]
        shared = torch.bmm(x[:, :1].transpose(0, 1), self.stack[:1])
        x = torch.cat(parts, dim=1) + shared.transpose(0, 1)
        return self.last(functional.gelu(x))


PACKED = ("first.weight", "stack", "last.weight")


def packed_layer(dtype=torch.float32):
    """A shell bound to packed weights, and the module with what they unpack to."""
    torch.manual_seed(0)
    module = Experts().to(dtype)
    (layer,) = sequential_spec(module).layers
    values = dict(layer.tensors)
    for name in PACKED:
        how, parts = pack(name, values[name])
        module.get_parameter(name).data = how.unpack(parts)
        values[name] = PackedTensor(how, parts)
    shell = layer.make_shell(CPU)
    shell.bind(values)
    return shell, module


def call(shell, *args):
    return shell(None, Inputs(args), None)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 32, generator=generator).to(dtype)


@pytest.fixture
def made(monkeypatch):
    """Weak references to all weights that were unpacked, by shape."""
    found = []
    unpack = PackedTensor.unpack

    def noted(self, dtype=None):
        weights = unpack(self, dtype)
        found.append((tuple(weights.shape), weakref.ref(weights.untyped_storage())))
        return weights

    monkeypatch.setattr(PackedTensor, "unpack", noted)
    return found


def alive(made):
    gc.collect()
    return [shape for shape, ref in made if ref() is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_have_the_bits_of_the_unpacked_module(dtype):
    shell, module = packed_layer(dtype)
    ours, theirs = batch(dtype).requires_grad_(), batch(dtype).requires_grad_()
    out, plain = call(shell, ours), module(theirs)
    assert torch.equal(out, plain)
    for each in (out, plain):
        each.float().square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    found = shell.parameters["scale"].grad
    assert torch.equal(found.to(dtype), module.scale.grad)


def test_no_unpacked_weight_outlives_a_forward_and_backward_has_one_at_a_time(made):
    shell, _ = packed_layer()
    out = call(shell, batch().requires_grad_())
    assert len(made) == len(PACKED)
    assert alive(made) == []
    most = 0
    del made[:]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            most = max(most, sum(ref() is not None for _, ref in made))
            return func(*args, **(kwargs or {}))

    with torch.autograd.set_multithreading_enabled(False), Watch():
        out.square().sum().backward()
    assert len(made) == 7  # one for each product with frozen weights
    assert most == 1
    assert alive(made) == []


def test_no_weight_is_unpacked_or_kept_again_without_gradient(made):
    shell, module = packed_layer()
    with torch.no_grad():
        assert torch.equal(call(shell, batch()), module(batch()))
    assert len(made) == len(PACKED)
    assert alive(made) == []


def test_a_layer_that_fails_lets_go_of_its_weights_and_runs_again(made):
    shell, module = packed_layer()
    with pytest.raises(RuntimeError):
        call(shell, torch.ones(2, 8, 5))
    assert alive(made) == []
    assert shell.parameters["stack"].untyped_storage().nbytes() == 4
    assert torch.equal(call(shell, batch()), module(batch()))


def test_weights_read_while_the_layer_does_not_run_are_nan_not_numbers():
    shell, _ = packed_layer()
    leaf = shell.parameters["stack"]
    assert leaf.isnan().all()
    assert leaf.shape == (4, 32, 32)
    assert not leaf.requires_grad


def test_autocast_does_not_change_the_bits():
    shell, module = packed_layer()
    ours, theirs = batch().requires_grad_(), batch().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = call(shell, ours), module(theirs)
    assert torch.equal(out, plain)
    for each in (out, plain):
        each.float().square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_hooks_around_a_layer_see_what_is_kept_but_no_unpacked_weight():
    shell, _ = packed_layer()
    kept, back = [], []

    def note(tensor):
        kept.append(tuple(tensor.shape))
        return (tensor,)

    def bring(held):
        back.append(tuple(held[0].shape))
        return held[0]

    with torch.autograd.graph.saved_tensors_hooks(note, bring):
        out = call(shell, batch().requires_grad_())
    out.sum().backward()
    assert kept
    assert sorted(back) == sorted(shape for shape in kept)
    assert (32, 32) not in kept
    assert (4, 32, 32) not in kept


def test_binding_elsewhere_does_not_change_what_a_graph_made_before_reads():
    shell, module = packed_layer()
    x = batch().requires_grad_()
    out = call(shell, x)
    plain = {name: leaf.data for name, leaf in shell.parameters.items()}
    shell.bind({**plain, **{name: torch.zeros_like(plain[name]) for name in PACKED}})
    out.square().sum().backward()
    y = batch().requires_grad_()
    module(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
