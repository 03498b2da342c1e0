import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.memory import room_of
from roundpipe.plan.partition import front
from roundpipe.plan.schedule import Phase
from roundpipe.plan.shares import Part, largest_fused, partition_bytes, shares_of


def layer(weight=0, gradient=0, boundary=0, activation=0, peak=0, seconds=1) -> LayerCost:
    return LayerCost(
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        weight_bytes=weight,
        gradient_bytes=gradient,
        boundary_bytes=boundary,
        activation_bytes=activation,
        peak_bytes=peak,
    )


def costs(*layers: LayerCost) -> Costs:
    return Costs(layers, frozenset(i for i, each in enumerate(layers) if each.is_trainable))


def test_forward_stages_get_weights_and_backward_stages_gradients_beside_them() -> None:
    chain = costs(*[layer(10, 20, activation=5)] * 9)
    # Three layers forward take as long as one backward: 2 * 30 for the one, 2 * 20 + 5 beside.
    assert shares_of(chain, 105, 1).most == Part(30, 20, 5)
    assert shares_of(chain, 210, 1).most == Part(60, 40, 10)
    # What is left goes to backward first, up to what weights forward take already; then forward.
    assert shares_of(chain, 149, 1).most == Part(50, 20, 5)
    light = costs(*[layer(10, 2, activation=1)] * 9)
    assert shares_of(light, 2 * 30 + 2 * 6 + 3, 1).most == Part(30, 6, 3)


def test_where_not_even_single_layers_fit_behind_each_other_they_are_the_shares() -> None:
    chain = costs(layer(100, 0), layer(1, 90))
    need = Part(100, 90).twice
    assert shares_of(chain, need - 1, 1).most == Part(100, 90)
    with pytest.raises(PlanError, match="layer 0 does not fit"):
        shares_of(chain, 199, 1)


def test_a_fused_stage_apart_lies_beside_others_but_not_beside_itself() -> None:
    small, large = Part(10, 20, 5), Part(100, 200, 50)
    assert small.beside(large) == 110 + 220 + 50
    assert large.beside(small) == large.twice == 650


sizes = st.integers(0, 50)
any_costs = st.lists(st.builds(layer, sizes, sizes, sizes, sizes, sizes), min_size=1, max_size=9)


@settings(max_examples=60)
@given(any_costs, st.integers(0, 2000), st.integers(1, 9), st.booleans())
def test_what_the_front_gives_fits_or_is_single_layers(layers, limit, fuse, apart) -> None:
    chain = costs(*layers)
    fuse = min(fuse, len(layers))
    try:
        found = front(chain, memory_limit=limit, fuse=fuse, most_fused=fuse if apart else None)
    except PlanError:
        return
    most = Part.of(chain, range(len(layers) - fuse, len(layers)), Phase.FUSED)
    for at in range(len(layers)):
        most = most.or_more(Part.of(chain, range(at, at + 1), Phase.BACKWARD))
    for partition in found:
        assert partition_bytes(chain, partition) <= max(limit, most.twice)


@settings(max_examples=40)
@given(any_costs, st.integers(0, 2000), st.integers(1, 9), st.integers(1, 9))
def test_as_many_layers_are_fused_as_fit(layers, limit: int, least: int, most: int) -> None:
    chain = costs(*layers)
    least, most = min(least, len(layers)), min(most, len(layers))
    try:
        room_of(chain, limit, least, apart=True)
    except PlanError:
        with pytest.raises(PlanError):
            largest_fused(chain, limit, least=least, most=most)
        return
    found = largest_fused(chain, limit, least=least, most=most)
    assert least <= found <= max(least, most)
    shares = shares_of(chain, limit, found, apart=True)
    if found > least:
        top = Part.of(chain, range(len(layers) - found, len(layers)), Phase.FUSED)
        below = shares.most if found < len(layers) else top
        assert below.beside(top) <= limit
