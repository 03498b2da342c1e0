"""Ghost layers: they declare much, hold next to nothing, and train like any chain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.models.choose import spec_for
from roundpipe.models.ghost import GhostLayer, declared_costs, ghost_chain, ghost_loss
from roundpipe.plan.costs import Costs, LayerCost

FULL = LayerCost(
    forward_seconds=1.0, backward_seconds=2.0, weight_bytes=10**9, gradient_bytes=2 * 10**9
)
FROZEN = LayerCost(forward_seconds=1.0, backward_seconds=2.0, weight_bytes=10**9)
TIED = LayerCost(forward_seconds=3.0, backward_seconds=6.0, gradient_bytes=2 * 10**9, borrows=(0,))


@pytest.mark.parametrize(
    "costs",
    [
        Costs((FULL, FULL, FULL), frozenset({0, 1, 2})),
        Costs((FROZEN, FULL), frozenset({1})),
        Costs((FULL, FULL, TIED), frozenset({0, 1})),
    ],
)
def test_a_chain_declares_the_costs_it_was_made_of(costs: Costs) -> None:
    assert declared_costs(ghost_chain(costs)) == costs


def test_what_is_not_all_ghosts_declares_nothing() -> None:
    assert declared_costs(nn.Linear(2, 2)) is None
    assert declared_costs(nn.Sequential(GhostLayer(FULL), nn.Linear(1, 1))) is None
    assert declared_costs(nn.Sequential()) is None


def test_one_ghost_is_a_chain_of_one() -> None:
    assert declared_costs(GhostLayer(FULL)) == Costs((FULL,), frozenset({0}))


def test_a_ghost_holds_one_number() -> None:
    chain = ghost_chain(Costs((FULL,) * 5, frozenset(range(5))))
    assert sum(p.numel() for p in chain.parameters()) == 5


def test_a_borrowed_number_is_one_parameter_with_the_gradient_of_both_uses() -> None:
    chain = ghost_chain(Costs((FULL, FULL, TIED), frozenset({0, 1})))
    assert len(list(chain.parameters())) == 3
    assert not chain[2].weight.requires_grad
    with torch.no_grad():
        chain[0].weight.fill_(3.0)
    ghost_loss(chain(torch.ones(2, 1))).backward()
    assert chain[0].weight.grad is not None
    assert chain[0].weight.grad.item() == pytest.approx(6.0)  # of w squared
    spec = spec_for(chain)
    assert "0.weight" in spec.layers[2].tensors


def test_a_frozen_ghost_gets_no_gradient_and_passes_one_on() -> None:
    chain = ghost_chain(Costs((FULL, FROZEN), frozenset({0})))
    ghost_loss(chain(torch.ones(2, 1))).backward()
    assert chain[0].weight.grad is not None
    assert chain[1].weight.grad is None
