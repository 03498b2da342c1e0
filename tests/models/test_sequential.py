"""A Sequential as a chain: equal to the plain module, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.sequential import sequential_spec
from roundpipe.models.spec import Inputs


def microbatches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [Inputs((torch.randn(size, 6, generator=generator),)) for size in sizes]


def check_equal(chain_of, plain, module):
    spec = sequential_spec(module)
    inputs = microbatches(3, 1, 5)
    losses, grads = plain(module, inputs, lambda y: y.square().sum())
    chain = chain_of(spec)
    ours = [chain.forward_backward(x, lambda y: y.square().sum()) for x in inputs]
    assert all(map(torch.equal, losses, ours))
    assert chain.grads.keys() == grads.keys()
    return chain.grads, grads


def test_the_chain_equals_the_module_bit_for_bit(chain_of, plain):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    module = nn.Sequential(nn.Linear(6, 6), block, nn.LayerNorm(6), nn.Linear(6, 2))
    ours, theirs = check_equal(chain_of, plain, module)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_layers_are_the_children_and_names_are_the_users():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    spec = sequential_spec(module)
    assert [layer.name for layer in spec.layers] == ["0", "1"]
    assert list(spec.layers[1].tensors) == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert spec.layers[1].tensors["1.0.weight"] is module[1][0].weight
    assert [spec.needs_inputs(layer) for layer in range(2)] == [True, False]


def test_a_module_that_stands_twice_and_a_shared_parameter_have_one_name(chain_of, plain):
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second, first)
    spec = sequential_spec(module)
    assert [list(layer.tensors) for layer in spec.layers] == [
        ["0.weight", "0.bias"],
        [],
        ["0.weight", "2.bias"],
        ["0.weight", "0.bias"],
    ]
    ours, theirs = check_equal(chain_of, plain, module)
    for name, gradient in theirs.items():  # the uses add up in another order
        torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-6)


def test_any_other_module_is_one_layer_called_with_the_inputs(chain_of):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x, *, scale):
            return self.linear(x) * scale

    class OtherForward(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    module = Two()
    spec = sequential_spec(module)
    assert [layer.name for layer in spec.layers] == ["Two"]
    x = torch.randn(3, 2)
    assert torch.equal(chain_of(spec).forward(Inputs((x,), {"scale": 3.0})), module(x, scale=3.0))
    assert len(sequential_spec(OtherForward(nn.Tanh(), nn.Tanh())).layers) == 1


def test_a_tuple_passes_between_layers_as_one_argument(chain_of):
    class Fork(nn.Module):
        def forward(self, x):
            return x, x + 1

    class Join(nn.Module):
        def forward(self, pair):
            return pair[0] * pair[1]

    module = nn.Sequential(Fork(), Join())
    x = torch.randn(3)
    assert torch.equal(chain_of(sequential_spec(module)).forward(Inputs((x,))), module(x))


def test_weights_loaded_into_bound_tensors_are_used_at_once(chain_of):
    torch.manual_seed(0)
    module, other = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))
    chain = chain_of(sequential_spec(module))
    for name, tensor in other.state_dict().items():
        chain.tensors[name].copy_(tensor)
    x = torch.randn(2, 6)
    assert torch.equal(chain.forward(Inputs((x,))), other(x))


def test_a_hook_on_the_whole_chain_is_refused():
    module = nn.Sequential(nn.Tanh(), nn.Tanh())
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="a hook on the whole Sequential would not run"):
        sequential_spec(module)


def test_an_empty_chain_is_refused():
    with pytest.raises(ModelError, match="no layers: an empty Sequential"):
        sequential_spec(nn.Sequential())


def test_a_change_after_wrapping_is_told():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    spec = sequential_spec(module)
    module.train(not module.training)
    assert spec.changed_since_wrapping() is None
    module[1].p = 0.3
    assert spec.changed_since_wrapping() == "attribute changed: 1.p: 0.0 -> 0.3"
