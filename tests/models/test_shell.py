"""Shells: copied without weights, bound to views, followed by flags, safe from two threads."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.sequential import sequential_spec
from roundpipe.models.spec import Inputs

CPU = torch.device("cpu")


def shell_of(module):
    layer = sequential_spec(module).layers[0]
    return layer, layer.make_shell(CPU)


def call(shell, *args):
    return shell(None, Inputs(args), None)


def storages(module):
    return {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}


def test_a_shell_shares_no_tensor_with_the_module_and_takes_no_memory_for_weights():
    module = nn.Linear(2000, 500)
    _, shell = shell_of(module)
    assert storages(module).isdisjoint(storages(shell.module))
    for parameter in shell.module.parameters():
        assert parameter.untyped_storage().nbytes() == 4


def test_an_unbound_shell_gives_nan_rather_than_numbers():
    _, shell = shell_of(nn.Linear(3, 2))
    assert call(shell, torch.ones(1, 3)).isnan().all()


def test_a_bound_shell_computes_with_the_views_it_is_bound_to():
    module = nn.Linear(3, 2)
    layer, shell = shell_of(module)
    slot = torch.zeros(64)
    views = {"weight": slot[:6].view(2, 3), "bias": slot[8:10]}
    shell.bind(views)
    x = torch.randn(4, 3)
    assert torch.equal(call(shell, x), torch.zeros(4, 2))
    for name, tensor in layer.tensors.items():
        views[name].copy_(tensor.detach())
    assert torch.equal(call(shell, x), module(x))


def test_binding_again_keeps_the_leaves_and_a_gradient_belongs_to_them():
    layer, shell = shell_of(nn.Linear(3, 2))
    leaves = dict(shell.parameters)
    for factor in (1.0, 2.0):
        shell.bind({name: tensor.detach() * factor for name, tensor in layer.tensors.items()})
    call(shell, torch.ones(1, 3)).sum().backward()
    assert all(shell.parameters[name] is leaf for name, leaf in leaves.items())
    assert torch.equal(leaves["weight"].grad, torch.ones(2, 3))
    assert layer.module.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_parameters_add_up_in_float32(dtype):
    module = nn.Linear(3, 2, bias=False, dtype=dtype)
    layer, shell = shell_of(module)
    shell.bind(layer.tensors)
    for _ in range(2):
        call(shell, torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert shell.parameters["weight"].grad.dtype == torch.float32


def test_frozen_parameters_stay_frozen():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    _, shell = shell_of(module)
    assert shell.parameters["weight"].requires_grad
    assert not shell.parameters["bias"].requires_grad


def test_a_parameter_tied_within_a_layer_stays_one_leaf():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(3, 3, bias=False)
            self.down = nn.Linear(3, 3, bias=False)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(self.up(x))

    module = Tied()
    layer, shell = shell_of(module)
    assert list(shell.parameters) == list(layer.tensors) == ["up.weight"]
    shell.bind(layer.tensors)
    call(shell, torch.ones(1, 3)).sum().backward()
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(shell.parameters["up.weight"].grad, module.up.weight.grad)


def test_configs_are_shared_and_hooks_run_in_the_shell():
    class Config:
        pass

    module = nn.Linear(3, 3)
    module.config = Config()
    seen = []
    module.register_forward_hook(lambda m, _args, _out: seen.append(m))
    layer, shell = shell_of(module)
    shell.bind(layer.tensors)
    call(shell, torch.ones(1, 3))
    assert shell.module.config is module.config
    assert seen == [shell.module]


def test_no_dict_of_the_users_module_is_the_shells_too():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    module.noted = module[1].noted = OrderedDict()  # one dict in two places
    _, shell = shell_of(nn.Sequential(module))
    for mine, theirs in zip(module.modules(), shell.module.modules(), strict=True):
        for key, value in vars(mine).items():
            if isinstance(value, dict):
                assert vars(theirs)[key] is not value, key
    assert shell.module.noted is shell.module[1].noted


def test_training_flags_follow_the_user_and_the_users_module_is_left_alone():
    module = nn.Dropout(1.0)
    _, shell = shell_of(module)
    assert torch.equal(call(shell, torch.ones(3)), torch.zeros(3))
    module.eval()
    shell.sync_mode()
    assert torch.equal(call(shell, torch.ones(3)), torch.ones(3))


def test_a_shell_never_checkpoints_gradients_itself():
    module = nn.Linear(2, 2)
    module.gradient_checkpointing = True
    _, shell = shell_of(module)
    assert shell.module.gradient_checkpointing is False
    assert module.gradient_checkpointing is True


class Counter(nn.Module):
    def __init__(self, *, in_place):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x * self.count


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_changes_in_forward_is_refused_by_name(in_place):
    layer, shell = shell_of(Counter(in_place=in_place))
    shell.bind(layer.tensors)
    with pytest.raises(ModelError, match="a buffer changed in forward: count"):
        call(shell, torch.ones(1))


@pytest.mark.parametrize("in_place", [True, False])
def test_whoever_keeps_its_buffers_is_told_which_changed_and_may_hang_others(in_place):
    layer, shell = shell_of(Counter(in_place=in_place))
    shell.bind(layer.tensors)
    shell.hang({"count": torch.full((), 4.0)})
    assert shell.changed() == []
    assert shell.run(None, Inputs((torch.ones(1),)), None).item() == 5.0
    assert shell.changed() == ["count"]
    assert shell.buffers["count"].item() == 5.0
    shell.bind(layer.tensors)
    assert shell.changed() == []
    assert layer.tensors["count"].item() == 0.0  # what was written to hung in its place


def test_writing_into_the_memory_behind_a_buffer_is_no_change_of_the_buffer():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            slot[2:].zero_()  # an upload into another part of the same memory
            return x * self.scale

    slot = torch.ones(4)
    _, shell = shell_of(Scale())
    shell.bind({"scale": slot[:2]})
    assert torch.equal(call(shell, torch.ones(2)), torch.ones(2))


def test_tensors_of_another_layer_reached_by_an_attribute_are_refused():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.friends = [first]  # a list hides a module from PyTorch
    with pytest.raises(ModelError, match=r"tensor of another layer by an attribute: 0\.weight"):
        sequential_spec(nn.Sequential(first, second))


def test_a_module_that_cannot_be_copied_is_refused_when_wrapped():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(ModelError, match="cannot be copied: Linear"):
        sequential_spec(module)


def test_two_threads_with_shells_of_one_module_get_right_results():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layer = sequential_spec(nn.Sequential(module)).layers[0]
    barrier = threading.Barrier(2, timeout=30)
    x = torch.ones(2, 8)

    def case(factor):
        # In turn: functional_call changes the module itself for as long as it runs.
        weights = {name: tensor.detach() * factor for name, tensor in layer.tensors.items()}
        plain = {name[2:]: tensor for name, tensor in weights.items()}
        want = torch.func.functional_call(module, plain, (x,)).detach()
        return weights, want

    def run(weights, want):
        barrier.wait()
        shell, wrong = layer.make_shell(CPU), 0
        for _ in range(100):
            barrier.wait()
            shell.bind(weights)
            wrong += not torch.equal(call(shell, x), want)
        return wrong

    cases = [case(factor) for factor in (0.5, 2.0)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, *zip(*cases, strict=True))) == [0, 0]


def test_binding_400_tensors_is_quick():
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(200)))
    layer, shell = shell_of(nn.Sequential(module))
    views = {name: tensor.detach().clone() for name, tensor in layer.tensors.items()}
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        shell.bind(views)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005  # ten times what it may take
