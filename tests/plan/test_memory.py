import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.memory import (
    Room,
    microbatch_bytes,
    room_of,
    slot_bytes,
    stage_bytes,
)
from roundpipe.plan.schedule import Phase


def layer(weight=0, gradient=0, boundary=0, activation=0, peak=0) -> LayerCost:
    return LayerCost(
        forward_seconds=1,
        backward_seconds=2,
        weight_bytes=weight,
        gradient_bytes=gradient,
        boundary_bytes=boundary,
        activation_bytes=activation,
        peak_bytes=peak,
    )


def costs(*layers: LayerCost) -> Costs:
    return Costs(layers, frozenset(i for i, each in enumerate(layers) if each.is_trainable))


THREE = costs(
    layer(1000, 2000, boundary=1, activation=100, peak=10),
    layer(3000, 6000, boundary=2, activation=300, peak=40),
    layer(5000, 9000, boundary=4, activation=500, peak=20),
)


def test_a_forward_stage_holds_weights_boundaries_and_its_layer_at_worst() -> None:
    assert slot_bytes(THREE, range(2), Phase.FORWARD) == 4000
    boundaries = 2 * (1 + 2 + 4)  # in; out, where the backward of layer 1 begins; out
    assert microbatch_bytes(THREE, range(2), Phase.FORWARD) == boundaries + 40
    assert stage_bytes(THREE, range(2), Phase.FORWARD) == 2 * 4000 + boundaries + 40


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.FUSED])
def test_a_stage_with_backward_holds_gradients_and_all_its_activations_too(phase: Phase) -> None:
    assert slot_bytes(THREE, range(2), phase) == 4000 + 8000
    assert microbatch_bytes(THREE, range(2), phase) == 6 * 4 + 400 + 40
    assert stage_bytes(THREE, range(2), phase) == 2 * 12000 + 6 * 4 + 400 + 40


def test_the_last_stage_has_no_boundary_above() -> None:
    assert microbatch_bytes(THREE, range(2, 3), Phase.FUSED) == 6 * 4 + 500 + 20


def test_layers_that_backward_does_not_reach_keep_nothing() -> None:
    frozen = costs(layer(activation=100), layer(activation=200), layer(1, 1, activation=400))
    assert microbatch_bytes(frozen, range(3), Phase.FUSED) == 400
    assert microbatch_bytes(costs(layer(activation=100)), range(1), Phase.FUSED) == 0


def test_layers_frozen_above_a_trained_one_keep_their_activations() -> None:
    adapted = costs(layer(1, 1, activation=100), layer(activation=200))
    assert microbatch_bytes(adapted, range(2), Phase.BACKWARD) == 300


sizes = st.integers(0, 50)
any_costs = st.lists(st.builds(layer, sizes, sizes, sizes, sizes, sizes), min_size=1, max_size=9)


@settings(max_examples=40)
@given(any_costs, st.data())
def test_part_of_a_stage_never_takes_more_than_all_of_it(layers, data) -> None:
    chain = costs(*layers)
    edges = st.integers(0, len(layers))
    start, stop = sorted(data.draw(st.tuples(edges, edges).filter(lambda e: e[0] != e[1])))
    whole = range(start, stop)
    begin = data.draw(st.sampled_from(whole))
    part = range(begin, data.draw(st.integers(begin + 1, stop)))
    for phase in Phase:
        for count in (slot_bytes, microbatch_bytes, stage_bytes):
            assert count(chain, part, phase) <= count(chain, whole, phase)
        room = Room(chain, limit=0, slot=30, microbatch=30)
        assert room.needs(part, phase) <= room.needs(whole, phase)


@settings(max_examples=40)
@given(any_costs, st.data())
def test_a_stage_that_fits_backward_fits_forward(layers, data) -> None:
    chain = costs(*layers)
    start = data.draw(st.integers(0, len(layers) - 1))
    alone = range(start, start + 1)
    backward = stage_bytes(chain, alone, Phase.BACKWARD)
    assert stage_bytes(chain, alone, Phase.FORWARD) <= backward


def test_a_stage_beside_the_fused_one_takes_one_slot_of_each() -> None:
    chain = costs(layer(10, activation=7), layer(100, 200, activation=50))
    room = room_of(chain, 1000, 1, apart=True)
    assert room.needs(range(1), Phase.FORWARD) == 10 + 300 + 50
    assert Room(chain, 1000).needs(range(1), Phase.FORWARD) == 20


def test_a_fused_stage_alone_in_the_chain_follows_itself() -> None:
    chain = costs(layer(100, 100), layer(100, 100))
    assert room_of(chain, 800, 2, apart=True).limit == 800
    with pytest.raises(PlanError, match="2 fused layers do not fit on the device: 800 bytes"):
        room_of(chain, 799, 2, apart=True)


def test_the_way_out_of_too_many_activations_is_more_microbatches() -> None:
    room = Room(costs(layer(100, 100, activation=1000)), 700)
    with pytest.raises(PlanError) as caught:
        room.require(range(1), Phase.FUSED)
    assert str(caught.value) == (
        "layer 0 does not fit on the device: 1400 bytes of 700\n"
        "hint: device_memory_limit=1400 if the device has it, or num_microbatch 4 times as large"
    )


def test_no_microbatch_is_small_enough_where_weights_do_not_fit() -> None:
    room = Room(costs(layer(100, 100, activation=1000)), 400)
    with pytest.raises(PlanError, match=r"hint: device_memory_limit=1400 if the device has it$"):
        room.require(range(1), Phase.FUSED)
