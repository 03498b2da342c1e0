from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import DeadlockError
from roundpipe.plan.actions import COMPUTE, Action
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import forward_only, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.simulate import bubble, compute_seconds, makespan, simulate


def even_passes(num_stages: int, devices: int, microbatches: int):
    stages = [range(stage, stage + 1) for stage in range(num_stages)]
    return forward_only(stages, devices=devices, microbatches=microbatches)


def unit(action: Action) -> float:
    return 1.0 if action.op in COMPUTE else 0.0


def equal_stages(forward: int, seconds: float) -> tuple[Partition, Costs]:
    """Forward stages of three layers and backward stages of one, all equally long."""
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


def test_two_stages_on_two_devices() -> None:
    # 0: F0.0 F0.1
    # 1:      F1.0 F1.1
    spans = simulate(even_passes(2, 2, 2), unit)
    assert {str(span.action): (span.stream, span.start, span.end) for span in spans} == {
        "F0.0": ("0.compute", 0, 1),
        "F0.1": ("0.compute", 1, 2),
        "F1.0": ("1.compute", 1, 2),
        "F1.1": ("1.compute", 2, 3),
    }
    assert makespan(spans) == 3
    assert bubble(spans) == pytest.approx(1 / 3)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 7), st.floats(0.01, 9))
def test_a_pass_of_even_stages_takes_as_long_as_the_formula_says(
    num_stages: int, devices: int, extra: int, seconds: float
) -> None:
    microbatches = devices + extra
    spans = simulate(even_passes(num_stages, devices, microbatches), lambda _: seconds)
    rows, rest = divmod(num_stages - 1, devices)
    expected = (rows * microbatches + rest + microbatches) * seconds
    assert makespan(spans) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 6), st.floats(0.01, 9))
def test_a_step_of_even_stages_takes_as_long_as_the_formula_says(
    forward: int, devices: int, extra: int, seconds: float
) -> None:
    partition, costs = equal_stages(forward, seconds)
    microbatches = devices + extra
    schedule = round_robin(partition, costs, devices=devices, microbatches=microbatches)
    spans = simulate(schedule, compute_seconds(schedule, costs))
    rows, rest = divmod(partition.num_stages - 1, devices)
    expected = (rows * microbatches + rest + microbatches) * seconds
    assert makespan(spans) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 4))
def test_the_ramp_is_all_that_idles_when_devices_divide_stages(
    rows: int, devices: int, extra: int
) -> None:
    """Device time is (M S + N (N - 1)) t: work, and the triangle at each end."""
    microbatches = devices + extra
    spans = simulate(even_passes(rows * devices, devices, microbatches), unit)
    work = microbatches * rows * devices
    assert makespan(spans) * devices == pytest.approx(work + devices * (devices - 1), rel=1e-9)
    assert bubble(spans) == pytest.approx(1 - work / (work + devices * (devices - 1)), rel=1e-9)


def test_lowering_does_not_slow_a_step_whose_transfers_take_no_time(small_step) -> None:
    for devices in (1, 2, 3):
        computation, costs, chain = small_step(devices, staleness=0)
        seconds = compute_seconds(computation, costs)
        alone = makespan(simulate(computation, seconds))
        assert makespan(simulate(chain[0], seconds)) == pytest.approx(alone, rel=1e-9)


def test_at_staleness_1_steps_follow_each_other_without_a_ramp(small_step) -> None:
    computation, costs, chain = small_step(2, staleness=1)
    seconds = compute_seconds(computation, costs)
    work = sum(map(seconds, computation.waits)) / 2
    ramp = makespan(simulate(chain[:1], seconds)) - work
    three = makespan(simulate(chain, seconds))
    assert three == pytest.approx(3 * work + ramp, abs=1e-6)


def test_an_exact_step_waits_for_the_updates_of_the_one_before(small_step) -> None:
    computation, costs, chain = small_step(2, staleness=0)
    seconds = compute_seconds(computation, costs)
    spans = simulate(chain, seconds)
    first, second = spans[: len(chain[0].order)], spans[len(chain[0].order) :]
    updated = max(span.end for span in first if str(span.action) == "S0")
    begin = min(span.start for span in second if str(span.action) == "U0#0")
    assert begin >= updated


def test_a_circle_is_told_with_the_heads_of_streams() -> None:
    good = even_passes(2, 2, 1)
    circle = replace(good, waits={**good.waits, Action.parse("F0.0"): (Action.parse("F1.0"),)})
    with pytest.raises(DeadlockError, match=r"'0.compute': 'F0\.0'"):
        simulate(circle, unit)


def test_nothing_takes_no_time_and_has_no_bubble() -> None:
    assert makespan([]) == 0
    assert bubble([]) == 0


@pytest.fixture
def small_step() -> Callable:
    """``small_step(devices, staleness=...)``: computation, costs and three lowered steps."""

    def make(devices: int, *, staleness: int):
        partition, costs = equal_stages(1, 3.0)
        computation = round_robin(partition, costs, devices=devices, microbatches=4)
        return (
            computation,
            costs,
            lower_chain(computation, Options(costs=costs, staleness=staleness)),
        )

    return make
