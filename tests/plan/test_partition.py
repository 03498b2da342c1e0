from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.partition import Partition, forward_stages, front, partition_for


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


def cuts(layers: range) -> list[list[range]]:
    """Every way to cut ``layers`` into stages."""
    inner = list(layers)[1:]
    found = []
    for count in range(len(inner) + 1 if layers else 0):
        for at in combinations(inner, count):
            edges = pairwise([layers.start, *at, layers.stop])
            found.append([range(first, stop) for first, stop in edges])
    return found or [[]]


def longest(costs: Costs, partition: Partition) -> float:
    def both(stage: range) -> float:
        return sum(
            costs.layers[i].forward_seconds + costs.layers[i].backward_seconds for i in stage
        )

    forward = [sum(costs.layers[i].forward_seconds for i in stage) for stage in partition.forward]
    return max([*forward, *map(both, (partition.fused, *partition.backward))])


def every_partition(costs: Costs) -> list[Partition]:
    lowest = costs.first_trainable
    found = []
    for start in range(costs.num_layers):
        down = range(start) if lowest is None else range(min(lowest, start), start)
        for forward in cuts(range(start)):
            for backward in cuts(down) if lowest is not None else [[]]:
                found.append(
                    Partition(
                        tuple(forward), range(start, costs.num_layers), tuple(reversed(backward))
                    )
                )
    return found


seconds = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(seconds, st.integers(0, 5))
def test_the_front_equals_brute_force(layers, trained_from: int) -> None:
    costs = chain(layers, trained_from=min(trained_from, len(layers) - 1))
    best: dict[int, float] = {}
    for partition in every_partition(costs):
        count = partition.num_stages
        best[count] = min(best.get(count, 1e9), longest(costs, partition))
    found = front(costs)
    assert {p.num_stages: longest(costs, p) for p in found} == {
        p.num_stages: best[p.num_stages] for p in found
    }
    assert [p.num_stages for p in found] == sorted({p.num_stages for p in found})


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


def test_a_front_of_many_different_layers_stays_quick_and_sorted() -> None:
    costs = chain([(100 + 7 * i % 13, 200 + 11 * i % 17) for i in range(60)])
    counts = [partition.num_stages for partition in front(costs)]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
