from __future__ import annotations

import json
from fractions import Fraction
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.partition import (
    Partition,
    forward_stages,
    front,
    fused_choices,
    layer_by_layer,
    partition_for,
)
from roundpipe.plan.schedule import Phase

PUBLISHED = Path(__file__).parents[1] / "reference" / "published.json"


def chain(seconds, *, trained_from=0, weight=0, activation=0) -> Costs:
    layers = tuple(
        LayerCost(
            forward_seconds=forward,
            backward_seconds=backward,
            weight_bytes=weight,
            gradient_bytes=1 if at >= trained_from else 0,
            activation_bytes=activation,
        )
        for at, (forward, backward) in enumerate(seconds)
    )
    return Costs(layers, frozenset(range(trained_from, len(layers))))


def took(costs: Costs, stage: range, phase: Phase) -> float:
    held = [costs.layers[layer] for layer in stage]
    backward = 0 if phase is Phase.FORWARD else sum(cost.backward_seconds for cost in held)
    return sum(cost.forward_seconds for cost in held) + backward


def longest(costs: Costs, partition: Partition, *, least: int = 0) -> float:
    """Seconds of the longest stage; a fused stage of at most ``least`` layers does not count."""
    is_counted = len(partition.fused) > least
    fused = took(costs, partition.fused, Phase.FUSED) if is_counted else 0.0
    forward = [took(costs, stage, Phase.FORWARD) for stage in partition.forward]
    backward = [took(costs, stage, Phase.BACKWARD) for stage in partition.backward]
    return max([fused, *forward, *backward])


seconds = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(seconds, st.integers(0, 6), st.integers(1, 3), st.floats(0.5, 40))
def test_stages_cover_all_layers_forward_and_trained_layers_backward(
    layers, trained_from: int, fuse: int, limit: float
) -> None:
    costs = chain(layers, trained_from=trained_from)
    partition = partition_for(costs, limit, fuse=fuse)
    assert [i for stage in partition.forward for i in stage] == list(range(partition.fused.start))
    below = range(min(trained_from, partition.fused.start), partition.fused.start)
    down = [i for stage in partition.backward for i in reversed(stage)]
    assert down == (list(reversed(below)) if costs.owners else [])
    assert len(partition.fused) >= min(fuse, len(layers))
    for stage in (*partition.forward, *partition.backward):
        within = sum(
            costs.layers[i].forward_seconds
            + costs.layers[i].backward_seconds * (stage in partition.backward)
            for i in stage
        )
        assert len(stage) == 1 or within <= limit * (1 + 1e-8)


def test_backward_stages_hold_a_third_of_a_forward_stage() -> None:
    partition = partition_for(chain([(1, 2)] * 7), 3)
    assert str(partition) == "forward 0-2 3-5 · fused 6-6 · backward 5-5 4-4 3-3 2-2 1-1 0-0"


def test_two_stages_fit_beside_one_microbatch() -> None:
    costs = chain([(1, 2)] * 6, weight=100, activation=50)
    partition = partition_for(costs, 1e9, memory_limit=2 * 2 * 101 + 2 * 50)
    assert max(map(len, (*partition.backward, partition.fused))) == 2
    assert partition_for(costs, 1e9).fused == range(6)


def test_a_layer_that_fits_nowhere_is_named_with_what_it_needs() -> None:
    with pytest.raises(PlanError, match=r"layer 0 does not fit on the device: 252 bytes of 200"):
        partition_for(chain([(1, 2)] * 2, weight=100, activation=50), 1, memory_limit=200)


def test_fused_layers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(PlanError, match="3 fused layers do not fit"):
        partition_for(chain([(1, 2)] * 4, weight=100), 1, memory_limit=500, fuse=3)


@pytest.mark.parametrize(
    ("forward", "fused", "backward"),
    [
        ([range(1)], range(2, 3), []),
        ([range(2)], range(2, 3), [range(1)]),
        ([range(2)], range(2, 2), []),
        ([range(1), range(1, 1), range(1, 2)], range(2, 3), []),
    ],
)
def test_stages_that_miss_a_layer_are_refused(forward, fused, backward) -> None:
    with pytest.raises(PlanError):
        Partition(tuple(forward), fused, tuple(backward))


def test_forward_stages_fill_up_to_the_limit() -> None:
    assert forward_stages(chain([(2, 9), (1, 9), (1, 9), (5, 9)]), 3) == (
        range(2),
        range(2, 3),
        range(3, 4),
    )


def test_even_stages_are_as_even_as_whole_layers_allow() -> None:
    costs = chain([(1, 2)] * 29)
    partition = next(p for p in front(costs, fuse=1, most_fused=1) if p.num_stages == 15)
    assert [len(stage) for stage in partition.forward] == [7, 7, 7, 7]
    assert [len(stage) for stage in partition.backward] == [3, 3, 3, 3, 3, 3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("model", "num_layers", "forward", "backward"),
    [
        ("qwen3-1.7b", 28, [7] * 4, [3] * 8 + [2] * 2),
        ("llama3.1-8b", 32, [5] * 4 + [6] * 2, [2] * 16),
        ("gpt-oss-20b", 24, [4] + [5] * 4, [1] * 24),
        ("qwen3-32b", 64, [2] * 2 + [3] * 20, [1] * 64),
        ("qwen3-235b-a22b", 94, [2] * 47, [1] * 94),
    ],
)
def test_published_partitions_are_on_the_front(model, num_layers, forward, backward) -> None:
    times = json.loads(PUBLISHED.read_text())["layer_times_ms_one_4090"][model]
    block, head = (
        (times["forward"], times["backward"]),
        (times["head_forward"], times["head_backward"]),
    )
    costs = chain([block] * num_layers + [head])
    num_stages = len(forward) + 1 + len(backward)
    partition = next(each for each in front(costs) if each.num_stages == num_stages)
    assert partition.fused == range(num_layers, num_layers + 1)
    assert sorted(len(stage) for stage in partition.forward) == sorted(forward)
    assert [len(stage) for stage in partition.backward] == backward


def test_a_front_up_to_a_longest_stage_is_the_part_of_the_front_below_it() -> None:
    costs = chain([(3, 5), (1, 1), (2, 7), (4, 4), (1, 3), (2, 2)])
    whole = front(costs)
    for limit in (9, 10, 13, 20, 100, inf):
        within = [p for p in whole if longest(costs, p) <= limit]
        assert front(costs, longest=limit) == within
    assert front(costs, longest=2) == whole[-1:]  # none is so short: the nearest


def test_a_limit_that_was_added_up_in_floats_means_its_sum() -> None:
    costs = chain([(0.1, 0.2)] * 4)
    assert 3 * (Fraction(0.1) + Fraction(0.2)) > Fraction(0.9)
    assert partition_for(costs, 0.9).fused == range(1, 4)


@pytest.mark.parametrize(
    ("trained_from", "backward"), [(0, (2, 1, 0)), (2, (2,)), (3, ()), (4, ())]
)
def test_layer_by_layer_goes_backward_as_far_as_anything_is_trained(trained_from, backward) -> None:
    partition = layer_by_layer(chain([(1, 2)] * 4, trained_from=trained_from))
    assert partition.forward == (range(1), range(1, 2), range(2, 3))
    assert partition.fused == range(3, 4)
    assert partition.backward == tuple(range(layer, layer + 1) for layer in backward)


def test_no_limit_gives_one_stage() -> None:
    costs = chain([(0.1, 0.2)] * 4)
    assert partition_for(costs, inf).num_stages == 1
    assert forward_stages(costs, inf) == (range(4),)


def test_a_long_top_layer_does_not_hold_up_the_others_when_set_apart() -> None:
    costs = chain([(1, 2)] * 6 + [(10, 20)])
    assert [longest(costs, p) for p in front(costs)][:3] == [48, 30, 30]
    apart = front(costs, most_fused=1)
    assert min(longest(costs, p, least=1) for p in apart) == 3
    assert {p.fused for p in apart} == {range(6, 7)}


def test_a_fused_stage_set_apart_takes_as_many_layers_as_fit_beside_the_others() -> None:
    costs = chain([(1, 2)] * 6, weight=100, activation=50)
    slot, other = 101, 101
    limit = other + 3 * slot + 3 * 50
    for most, fused in ((1, 1), (3, 3), (6, 3)):
        for partition in front(costs, memory_limit=limit, most_fused=most):
            assert len(partition.fused) == fused
    assert len(front(costs, fuse=2, most_fused=1)[0].fused) == 2
    with pytest.raises(PlanError, match="does not fit beside the fused layers"):
        front(costs, memory_limit=limit, fuse=4, most_fused=6)


def test_forward_stages_fit_into_the_memory_limit() -> None:
    costs = chain([(1, 2)] * 6, weight=100)
    assert [len(stage) for stage in forward_stages(costs, inf, memory_limit=402)] == [2, 2, 2]
    with pytest.raises(PlanError, match="layer 0 does not fit on the device: 202 bytes of 199"):
        forward_stages(costs, inf, memory_limit=199)


def test_choices_of_fused_layers_end_with_the_most_that_fit() -> None:
    costs = chain([(1, 2)] * 24, weight=100, activation=50)
    assert fused_choices(costs) == [1, 6, 12, 18, 24]
    most = fused_choices(costs, 101 + 10 * 151)
    assert most == [1, 3, 5, 8, 10]
    assert fused_choices(costs, 101 + 10 * 151, between=0) == [1, 10]
    with pytest.raises(PlanError, match="layer 0 does not fit"):
        fused_choices(costs, 100)


def test_no_layer_is_fused_for_a_recompute_it_never_had() -> None:
    assert fused_choices(chain([(1, 2)] * 8, trained_from=6)) == [1, 2]
    assert fused_choices(chain([(1, 2)] * 8, trained_from=8)) == [1]
