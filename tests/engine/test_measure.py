"""Costs come from sizes first and from a run's spans then."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import bitsandbytes
import pytest
from torch import nn

from roundpipe.engine.measure import costs_from_sizes, measured, measured_by_visits, weighed
from roundpipe.engine.weigh import Sizes
from roundpipe.models.choose import spec_for
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span
from roundpipe.store.build import build_store


def costs_of(model):
    spec = spec_for(model)
    layers = build_store([layer.tensors for layer in spec.layers])
    return costs_from_sizes(spec, layers), layers


def test_a_layers_time_is_as_its_matrices_and_its_bytes_are_those_it_moves():
    costs, layers = costs_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 64)))
    small, middle, large = costs.layers
    assert large.forward_seconds > middle.forward_seconds > small.forward_seconds
    assert [c.backward_seconds for c in costs.layers] == pytest.approx(
        [2 * c.forward_seconds for c in costs.layers]
    )
    assert [c.weight_bytes for c in costs.layers] == [x.slot_layout.num_bytes for x in layers]
    assert costs.owners == {0, 1, 2}


def test_packed_matrices_count_as_what_they_unpack_to():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 96, bias=False))
    plain, _ = costs_of(copy.deepcopy(model).requires_grad_(False))
    packed = nn.Sequential(
        *(bitsandbytes.nn.Linear4bit(m.in_features, m.out_features, bias=False) for m in model)
    )
    packed.load_state_dict(model.state_dict())
    costs, layers = costs_of(packed.to("cpu").requires_grad_(False))
    for ours, whole, layer in zip(costs.layers, plain.layers, layers, strict=True):
        assert ours.forward_seconds == whole.forward_seconds
        assert ours.weight_bytes == layer.slot_layout.num_bytes < 0.25 * whole.weight_bytes
    assert [cost.peak_bytes for cost in costs.layers] == [4 * 64 * 64, 4 * 64 * 96]


def test_a_table_in_front_computes_nothing():
    costs, _ = costs_of(nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 8), nn.Linear(8, 500)))
    table, middle, head = costs.layers
    assert table.forward_seconds < middle.forward_seconds < head.forward_seconds


def test_frozen_layers_own_no_gradient():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    costs, _ = costs_of(model)
    assert costs.owners == {1}
    assert costs.layers[0].gradient_bytes == 0


def run_with(spans, layer_seconds):
    visits = (
        Visit(0, 0, Phase.FORWARD, range(2), 0, (0,)),
        Visit(1, 1, Phase.FUSED, range(2, 3), 0, (0,)),
        Visit(2, 2, Phase.BACKWARD, range(2), 0, (0,)),
    )
    return SimpleNamespace(
        layer_seconds=layer_seconds,
        timings=SimpleNamespace(spans=lambda: spans),
        program=SimpleNamespace(schedule=SimpleNamespace(visits=visits)),
    )


def span(op, visit, seconds):
    return Span("0.compute", Action(op, visit, 0), 1.0, 1.0 + seconds)


def test_a_backwards_time_goes_to_its_layers_by_their_forward():
    costs, _ = costs_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    spans = [
        span(Op.FORWARD, 0, 4.0),
        span(Op.FUSED, 1, 9.0),
        span(Op.RECOMPUTE, 2, 100.0),
        span(Op.BACKWARD, 2, 8.0),
        span(Op.BACKWARD, 2, 8.0),
        span(Op.BACKWARD, 2, 800.0),  # something came between: the median does not mind
    ]
    found = measured(costs, run_with(spans, {0: [1.0], 1: [3.0, 2.0, 90.0], 2: [2.0]}))
    assert [c.forward_seconds for c in found.layers] == [1.0, 3.0, 2.0]
    assert [c.backward_seconds for c in found.layers] == pytest.approx([2.0, 6.0, 7.0])
    assert [c.weight_bytes for c in found.layers] == [c.weight_bytes for c in costs.layers]
    assert found.owners == costs.owners


def test_what_was_not_measured_keeps_its_estimate_and_nothing_costs_nothing():
    costs, _ = costs_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    found = measured(costs, run_with([span(Op.FUSED, 1, 0.5)], {2: [2.0]}))
    assert found.layers[:2] == costs.layers[:2]
    assert found.layers[2].forward_seconds == 2.0
    assert 0 < found.layers[2].backward_seconds <= 1e-6  # its forward took longer than the whole


def test_bytes_that_were_weighed_take_the_place_of_those_not_known():
    costs, _ = costs_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    sizes = Sizes(boundary={1: 64}, kept={0: 100, 1: 200}, largest={0: 80, 1: 50})
    found = weighed(costs, sizes)
    assert [c.boundary_bytes for c in found.layers] == [0, 64]
    assert [c.activation_bytes for c in found.layers] == [100, 200]
    gradient = 8 * 8 * 4  # the largest parameter's
    assert [c.peak_bytes for c in costs.layers] == [gradient] * 2
    assert [c.peak_bytes for c in found.layers] == [gradient + 160, gradient + 100]


def test_what_a_layer_says_it_took_for_a_moment_counts_where_it_is_more():
    costs, _ = costs_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    sizes = Sizes(kept={0: 100, 1: 200}, largest={0: 80, 1: 50}, work={0: 90, 1: 1000})
    gradient = 8 * 8 * 4
    found = weighed(costs, sizes)
    assert [c.peak_bytes for c in found.layers] == [gradient + 160, gradient + 1000]


def test_visits_on_cards_tell_their_layers_apart_where_they_are_cut_differently():
    costs, _ = costs_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    visits = (
        Visit(0, 0, Phase.FORWARD, range(2), 0, (0,)),
        Visit(1, 1, Phase.FUSED, range(2, 3), 0, (0,)),
        Visit(2, 2, Phase.BACKWARD, range(1, 2), 0, (0,)),
        Visit(3, 3, Phase.BACKWARD, range(1), 0, (0,)),
    )
    spans = [
        span(Op.FORWARD, 0, 4.0),
        span(Op.FUSED, 1, 9.0),
        span(Op.RECOMPUTE, 2, 3.0),
        span(Op.BACKWARD, 2, 6.0),
        span(Op.RECOMPUTE, 3, 1.0),
        span(Op.BACKWARD, 3, 2.0),
    ]
    run = SimpleNamespace(
        layer_seconds={0: [0.01], 1: [0.03], 2: [0.02]},  # what Python takes to issue them
        backward_seconds={1: [0.5], 2: [0.06], 3: [0.02]},
        timings=SimpleNamespace(spans=lambda: spans),
        program=SimpleNamespace(schedule=SimpleNamespace(visits=visits)),
    )
    found = measured_by_visits(costs, run).layers
    assert [c.forward_seconds for c in found] == pytest.approx([1.0, 3.0, 3.0], rel=0.01)
    assert [c.backward_seconds for c in found] == pytest.approx([2.0, 6.0, 6.0], rel=0.01)
    assert [c.host_forward_seconds for c in found] == pytest.approx([0.01, 0.03, 0.02])
    assert [c.host_backward_seconds for c in found] == pytest.approx([0.02, 0.06, 0.5])
