"""What counts as a change after wrapping, and what does not."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from roundpipe.models.changes import TreeWatch


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4))


def test_train_and_eval_new_data_and_new_buffers_are_no_change(module):
    module.register_buffer("table", torch.ones(2))
    watch = TreeWatch(module)
    for act in (module.eval, module.train, module[1].eval):
        act()
        assert watch.difference() is None
    module[0].weight.data = torch.zeros(4, 4)
    module._buffers["table"] = torch.zeros(2)
    module.gradient_checkpointing = True
    assert watch.difference() is None


def test_an_equal_value_set_again_is_no_change(module):
    watch = TreeWatch(module)
    module[1].p = float("0.1")
    module[2].normalized_shape = (*module[2].normalized_shape,)  # another object
    assert watch.difference() is None


def test_a_changed_dropout_is_seen(module):
    watch = TreeWatch(module)
    module[1].p = 0.5
    assert watch.difference() == "attribute changed: 1.p: 0.1 -> 0.5"


def test_a_change_is_seen_after_a_change_of_mode(module):
    watch = TreeWatch(module)
    module.eval()
    assert watch.difference() is None
    module[1].p = 0.5
    assert watch.difference() == "attribute changed: 1.p: 0.1 -> 0.5"


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (lambda m, f: m.register_forward_hook(f), "forward hook"),
        (lambda m, f: m.register_forward_pre_hook(f), "forward pre-hook"),
        (lambda m, f: m.register_full_backward_hook(f), "backward hook"),
        (lambda m, f: m.register_full_backward_pre_hook(f), "backward pre-hook"),
    ],
)
def test_an_added_hook_is_seen_and_so_is_a_removed_one(module, register, kind):
    watch = TreeWatch(module)
    handle = register(module[0], lambda *_: None)
    assert watch.difference() == f"{kind} added to 0"
    handle.remove()
    handle = register(module[2], lambda *_: None)
    watch = TreeWatch(module)
    handle.remove()
    register(module[2], lambda *_: None)
    assert watch.difference() == f"{kind} changed on 2"


def test_a_replaced_module_or_parameter_and_a_patched_forward_are_seen(module):
    watch = TreeWatch(module)
    norm = module[2]
    module[2] = nn.Identity()
    assert watch.difference() == "submodule changed: Sequential.2"
    module[2] = norm
    assert watch.difference() is None
    weight = module[0].weight
    module[0].weight = nn.Parameter(torch.ones(4, 4))
    assert watch.difference() == "parameter replaced: 0.weight"
    module[0].weight = weight
    module[0].forward = lambda x: x
    assert str(watch.difference()).startswith("attribute changed: 0.forward: nothing -> ")


def test_looking_at_400_modules_is_quick():
    watch = TreeWatch(nn.Sequential(*(nn.Linear(2, 2) for _ in range(400))))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert watch.difference() is None
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.01  # ten times what it may take
