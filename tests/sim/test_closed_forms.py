"""Where theory gives a number, the simulator gives the same to 1e-9.

Stages take a microbatch ``f`` seconds forward and ``f + b`` backward, recompute included; it starts
when its gradient has come. ``N`` devices, ``M`` microbatches, ``v`` stages a device.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.plan.baselines import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    with_waiting_recompute,
)
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import replicated, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.sim.simulate import bubble, compute_seconds, makespan, simulate

SECONDS = st.floats(0.01, 9)


def played(generate, num_stages: int, devices: int, microbatches: int, f: float, b: float):
    """Spans of a step of ``num_stages`` equal stages, forward and backward apart in the last."""
    layer = LayerCost(forward_seconds=f, backward_seconds=b, gradient_bytes=1)
    costs = Costs((layer,) * num_stages, frozenset(range(num_stages)))
    stages = [range(stage, stage + 1) for stage in range(num_stages)]
    schedule = generate(stages, costs, devices=devices, microbatches=microbatches, fused=False)
    return simulate(with_waiting_recompute(schedule), compute_seconds(schedule, costs))


def same(found: float, expected: float) -> bool:
    return found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS)
def test_gpipe_and_1f1b_idle_while_a_microbatch_goes_through_all_other_stages(
    generate, devices: int, microbatches: int, f: float, b: float
) -> None:
    """(S - 1) / (M + S - 1) of the time, one stage a device."""
    spans = played(generate, devices, devices, microbatches, f, b)
    steps = microbatches + devices - 1
    assert same(makespan(spans), steps * (2 * f + b))
    assert same(bubble(spans), (devices - 1) / steps)


@pytest.mark.parametrize("generate", [interleaved, looped_bfs])
@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 3), SECONDS, SECONDS)
def test_several_stages_a_device_divide_the_ramp(
    generate, per_device: int, devices: int, groups: int, f: float, b: float
) -> None:
    """(N - 1) / (v M + N - 1) of the time, where N divides M."""
    microbatches = groups * devices
    spans = played(generate, per_device * devices, devices, microbatches, f, b)
    steps = per_device * microbatches + devices - 1
    assert same(makespan(spans), steps * (2 * f + b))
    assert same(bubble(spans), (devices - 1) / steps)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 5), SECONDS, SECONDS)
def test_looped_bfs_needs_no_more_than_as_many_microbatches_as_devices(
    per_device: int, devices: int, extra: int, f: float, b: float
) -> None:
    microbatches = devices + extra
    spans = played(looped_bfs, per_device * devices, devices, microbatches, f, b)
    assert same(bubble(spans), (devices - 1) / (per_device * microbatches + devices - 1))


def even_round(forward: int, seconds: float) -> tuple[Partition, Costs]:
    """Forward stages of three layers, backward stages and a fused one of one, equally long."""
    layer = LayerCost(
        forward_seconds=seconds / 3, backward_seconds=2 * seconds / 3, gradient_bytes=1
    )
    below = 3 * forward
    partition = Partition(
        tuple(range(at, at + 3) for at in range(0, below, 3)),
        range(below, below + 1),
        tuple(range(at, at + 1) for at in range(below - 1, -1, -1)),
    )
    return partition, Costs((layer,) * (below + 1), frozenset(range(below + 1)))


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.integers(1, 3), SECONDS)
def test_round_robin_goes_on_from_round_to_round(
    forward: int, devices: int, extra: int, rounds: int, seconds: float
) -> None:
    """(floor((S - 1) / N) M + (S - 1) mod N + M) t, S stages of all rounds of M >= N each."""
    partition, costs = even_round(forward, seconds)
    each = devices + extra
    schedule = round_robin(
        partition, costs, devices=devices, microbatches=rounds * each, rounds=rounds
    )
    spans = simulate(with_waiting_recompute(schedule), compute_seconds(schedule, costs))
    rows, rest = divmod(rounds * partition.num_stages - 1, devices)
    assert same(makespan(spans), (rows * each + rest + each) * seconds)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), SECONDS)
def test_replicated_stages_leave_nothing_idle_where_devices_divide_microbatches(
    forward: int, devices: int, share: int, seconds: float
) -> None:
    partition, costs = even_round(forward, seconds)
    schedule = replicated(partition, costs, devices=devices, microbatches=share * devices)
    spans = simulate(schedule, compute_seconds(schedule, costs))
    assert same(makespan(spans), partition.num_stages * share * seconds)
    assert same(bubble(spans), 0.0)
