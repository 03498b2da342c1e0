"""Modules that choose are found in a layer's first run, and later only they are looked at."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from roundpipe.engine.choices import Noting, Replaying
from roundpipe.engine.gates import OUTSIDE, Gates, Innermost
from roundpipe.engine.modes import Modes
from roundpipe.engine.random import DrawsFrom

CPU = torch.device("cpu")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.linear(x).topk(2)


class Mixture(nn.Module):
    """A router, dropout, and experts that sort what is none of the router's business."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(6, 6)
        self.router = Router()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        weights, chosen = self.router(x)
        return self.drop(torch.zeros_like(x).scatter(1, chosen, weights)) + self.expert(x)


def found_in(root, run):
    watch = Innermost(root)
    noting = Noting(watch.note)
    with watch.watching(), DrawsFrom(1, CPU, noting):
        run(root)
    return watch.places


def number_of(root, module):
    return list(root.modules()).index(module)


def test_the_innermost_module_is_named_and_hooks_are_gone_afterwards():
    root = Mixture()
    assert found_in(root, lambda root: root(X)) == {number_of(root, root.router)}
    assert found_in(root, lambda root: root(X).sort()) == {number_of(root, root.router), OUTSIDE}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in root.modules())


def test_the_mode_is_on_in_the_router_alone_and_replays_in_another_copy(monkeypatch):
    root = Mixture().eval()
    places = frozenset({number_of(root, root.router)})
    other = copy.deepcopy(root)
    seen = []
    dispatch = DrawsFrom.__torch_dispatch__

    def noted(self, func, *rest):
        seen.append(func)
        return dispatch(self, func, *rest)

    monkeypatch.setattr(DrawsFrom, "__torch_dispatch__", noted)
    noting = Noting()
    forward = Modes(DrawsFrom(1, CPU), noting, places, Gates(root))
    with forward.on():
        expected = root(X)
    forward.end()
    assert not forward.is_whole
    assert torch.ops.aten.topk.default in seen
    assert torch.ops.aten.addmm.default not in seen  # the expert's

    other.router.linear.weight.data.neg_()  # it would choose the others
    again = Modes(DrawsFrom(1, CPU), Replaying(noting.notes), places, Gates(other))
    with again.on():
        found = other(X)
    again.end()
    assert torch.equal(found != other.expert(X), expected != root.expert(X))
    seen.clear()
    other(X)
    assert seen == []


@pytest.mark.parametrize("places", ["router", "all"])
def test_where_a_layer_draws_too_all_of_it_is_under_the_mode(places):
    root = Mixture().train()
    at = frozenset({number_of(root, root.router) if places == "router" else OUTSIDE})
    noting = Noting()
    modes = Modes(DrawsFrom(1, CPU), noting, at, Gates(root), is_whole=True)
    with modes.on():
        root(X).sort()  # beside the router
    assert modes.end()[0]
    assert len(noting.notes) == (1 if places == "router" else 2)


def test_an_exception_in_a_gate_leaves_no_mode_behind():
    root = Mixture()
    at = frozenset({number_of(root, root.router)})
    modes = Modes(DrawsFrom(1, CPU), Noting(), at, Gates(root))
    with pytest.raises(RuntimeError, match="shape"), modes.on():
        root(torch.ones(2, 3))
    with modes.on():
        root(X)
    assert len(modes.choices.notes) == 1
    X.topk(1)
    assert len(modes.choices.notes) == 1


def test_a_module_within_another_that_chooses_is_not_looked_at_twice():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Router()

        def forward(self, x):
            return self.inner(x).values.sort().values

    root = Outer()
    at = frozenset(found_in(root, lambda root: root(X)))
    assert len(at) == 2
    noting = Noting()
    modes = Modes(DrawsFrom(1, CPU), noting, at, Gates(root))
    with modes.on():
        root(X)
    assert [name for name, _ in noting.notes] == ["aten.topk.default", "aten.sort.default"]
