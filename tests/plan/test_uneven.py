"""Stages as long as their devices are fast, and short ones where a step begins and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition, front
from roundpipe.plan.uneven import (
    UnevenDevices,
    partition_for_speeds,
    seconds_by_stage,
    tapered,
    uneven_front,
)
from roundpipe.sim.simulate import compute_seconds, makespan, simulate


def step_seconds(partition: Partition, costs: Costs, speeds) -> tuple[float, list[float]]:
    """How long a step takes, and the seconds of work at speed 1 that each device does in it."""
    schedule = round_robin(
        partition, costs, devices=len(speeds), microbatches=12, speeds=list(speeds)
    )
    alike = compute_seconds(schedule, costs)
    speed = {v.number: speeds[v.device] for v in schedule.visits}
    spans = simulate(schedule, lambda action: alike(action) / speed[action.index])
    work = [0.0] * len(speeds)
    for span in spans:
        work[schedule.visits[span.action.index].device] += alike(span.action)
    return makespan(spans), work


def quickest(found: list[Partition], costs: Costs, speeds) -> Partition:
    """Of those that fuse one layer, so that all recompute alike."""
    alike = [partition for partition in found if len(partition.fused) == 1]
    return min(alike, key=lambda partition: step_seconds(partition, costs, speeds)[0])


def test_a_device_twice_as_fast_gets_stages_twice_as_long(costs_of) -> None:
    devices = UnevenDevices(costs_of(13), (2.0, 1.0))
    partition = partition_for_speeds(devices, 3.0)
    assert (
        str(partition)
        == "forward 0-5 6-8 9-11 · fused 12-12 · backward 10-11 9-9 7-8 6-6 4-5 3-3 1-2 0-0"
    )
    assert seconds_by_stage(devices, partition)[:3] == [3.0, 3.0, 1.5]


@pytest.mark.parametrize("speeds", [(2.0, 1.0), (1.0, 2.0), (3.0, 1.0), (2.0, 1.0, 1.0)])
def test_each_device_gets_work_by_its_speed_and_the_step_is_quicker(costs_of, speeds) -> None:
    costs = costs_of(25)
    equal = quickest(front(costs), costs, speeds)
    partition = quickest(uneven_front(UnevenDevices(costs, speeds)), costs, speeds)
    seconds, work = step_seconds(partition, costs, speeds)
    assert seconds < 0.93 * step_seconds(equal, costs, speeds)[0]
    for share, speed in zip(work, speeds, strict=True):
        assert share / sum(work) == pytest.approx(speed / sum(speeds), abs=0.04)


def test_no_stage_is_larger_than_its_own_device(costs_of) -> None:
    costs = costs_of(9, weight=100, gradient=50)
    devices = UnevenDevices(costs, (1.0, 1.0), (1000, 650))
    partition = partition_for_speeds(devices, 1000.0)
    assert [len(stage) for stage in partition.forward] == [5, 1]  # 2 x 5 x 100 bytes; what is left
    assert len(partition.fused) == 3  # on the larger one, 2 x 3 x 150
    assert [len(stage) for stage in partition.backward] == [2, 3, 1]


def test_a_layer_that_its_device_cannot_hold_is_named(costs_of) -> None:
    costs = costs_of(3, weight=100, gradient=50)
    devices = UnevenDevices(costs, (1.0, 1.0), (1000, 250))
    with pytest.raises(PlanError, match="layer 2 does not fit on the device: 300 bytes of 250"):
        partition_for_speeds(devices, 2.0)


@pytest.mark.parametrize("speeds", [(), (1.0, 0.0)])
def test_speeds_that_are_none_are_refused(costs_of, speeds) -> None:
    with pytest.raises(PlanError, match="speeds must be above 0"):
        UnevenDevices(costs_of(2), speeds)


def test_memory_is_given_for_each_device(costs_of) -> None:
    with pytest.raises(PlanError, match="one a device, of 2"):
        UnevenDevices(costs_of(2), (1.0, 1.0), (5,))


@given(st.data(), st.integers(1, 9), st.integers(1, 3))
def test_every_layer_is_in_a_stage_that_keeps_its_limit(data, num_layers: int, fuse: int) -> None:
    seconds = st.sampled_from([0.0, 1.0, 2.5, 7.0])
    lowest = data.draw(st.integers(0, num_layers))
    layer = LayerCost(forward_seconds=1, backward_seconds=1)
    layers = tuple(
        replace(
            layer,
            forward_seconds=data.draw(seconds),
            backward_seconds=data.draw(seconds),
            gradient_bytes=int(number >= lowest),
        )
        for number in range(num_layers)
    )
    costs = Costs(layers, frozenset(range(lowest, num_layers)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3))
    devices, limit = UnevenDevices(costs, speeds), data.draw(st.sampled_from([1.0, 5.0, 20.0]))
    partition = partition_for_speeds(devices, limit, fuse=fuse)  # covers: it checks itself
    assert len(partition.fused) >= min(fuse, num_layers)
    reached = min(layers.start for layers in (partition.fused, *partition.backward))
    assert reached <= max(lowest, 0) or lowest == num_layers
    stages = [*partition.forward, partition.fused, *partition.backward]
    for stage, taken in zip(stages, seconds_by_stage(devices, partition), strict=True):
        is_forced = stage == partition.fused and len(stage) <= fuse
        assert taken <= limit * (1 + 1e-6) or len(stage) == 1 or is_forced
    counts = [found.num_stages for found in uneven_front(devices)]
    assert counts == sorted(set(counts))


def test_a_taper_cuts_the_ends_of_a_step(costs_of) -> None:
    partition = Partition(
        (range(4), range(4, 7)), range(7, 8), (range(5, 7), range(2, 5), range(2))
    )
    found = tapered(partition, costs_of(8), stages=1, pieces=2)
    assert found.forward == (range(2), range(2, 4), range(4, 7))
    assert found.backward == (range(5, 7), range(2, 5), range(1, 2), range(1))
    assert tapered(partition, costs_of(8), stages=9, pieces=9).forward == tuple(
        range(layer, layer + 1) for layer in range(7)
    )
    assert tapered(partition, costs_of(8), stages=0, pieces=3) == partition


def test_pieces_are_as_even_in_time_as_layers_allow() -> None:
    layers = [LayerCost(forward_seconds=s, backward_seconds=0) for s in (6, 1, 1, 4, 5)]
    partition = Partition((range(4),), range(4, 5), ())
    found = tapered(partition, Costs(tuple(layers), frozenset()), stages=1, pieces=2)
    assert found.forward == (range(1), range(1, 4))


def test_a_taper_shortens_the_ramp(costs_of) -> None:
    costs, speeds = costs_of(25), (1.0,) * 4
    partition = quickest(front(costs), costs, speeds)
    tapers = [tapered(partition, costs, stages=stages, pieces=2) for stages in (1, 2, 3, 4)]
    plain, _ = step_seconds(partition, costs, speeds)
    assert min(step_seconds(taper, costs, speeds)[0] for taper in tapers) < plain
