"""Weight-bound schedules: who computes what, in which order, and what runs on devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.baselines import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    with_waiting_recompute,
)
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.simulate import compute_seconds, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.plan.schedule import Schedule

MIB = 1 << 20
ALL = (gpipe, looped_bfs, one_f_one_b, interleaved)
SINGLES = [range(layer, layer + 1) for layer in range(4)]


def lines(schedule: Schedule) -> dict[str, str]:
    return {name: " ".join(map(str, queue)) for name, queue in schedule.streams.items()}


def waits(schedule: Schedule, text: str) -> str:
    found = {str(action): after for action, after in schedule.waits.items()}
    return " ".join(map(str, found[text]))


def test_gpipe_runs_everything_forward_then_everything_backward(costs_of) -> None:
    schedule = gpipe(SINGLES[:2], costs_of(2), devices=2, microbatches=2)
    assert lines(schedule) == {
        "0.compute": "F0.0 F0.1 R2.0 B2.0 R2.1 B2.1",
        "1.compute": "X1.0 X1.1",
    }
    assert [visit.gives_gradient for visit in schedule.visits] == [False, True, False]


def test_with_the_last_stage_apart_its_backward_begins_with_its_loss(costs_of) -> None:
    schedule = gpipe(SINGLES[:2], costs_of(2), devices=2, microbatches=2, fused=False)
    assert lines(schedule)["1.compute"] == "F1.0 F1.1 R2.0 B2.0 R2.1 B2.1"
    assert waits(schedule, "B2.1") == "F1.1"
    assert waits(schedule, "B3.1") == "B2.1"


def test_looped_bfs_goes_backward_from_the_last_microbatch_on(costs_of) -> None:
    schedule = looped_bfs(SINGLES, costs_of(4), devices=2, microbatches=2, fused=False)
    assert lines(schedule)["1.compute"] == (
        "F1.0 F1.1 F3.0 F3.1 R4.1 B4.1 R4.0 B4.0 R6.1 B6.1 R6.0 B6.0"
    )
    fused = looped_bfs(SINGLES, costs_of(4), devices=2, microbatches=2)
    assert lines(fused)["1.compute"] == "F1.0 F1.1 X3.0 X3.1 R5.0 B5.0 R5.1 B5.1"


def test_1f1b_warms_up_by_a_forward_for_each_stage_above(costs_of) -> None:
    schedule = one_f_one_b(SINGLES[:3], costs_of(3), devices=3, microbatches=4, fused=False)
    assert lines(schedule) == {
        "0.compute": "F0.0 F0.1 F0.2 R5.0 B5.0 F0.3 R5.1 B5.1 R5.2 B5.2 R5.3 B5.3",
        "1.compute": "F1.0 F1.1 R4.0 B4.0 F1.2 R4.1 B4.1 F1.3 R4.2 B4.2 R4.3 B4.3",
        "2.compute": "F2.0 R3.0 B3.0 F2.1 R3.1 B3.1 F2.2 R3.2 B3.2 F2.3 R3.3 B3.3",
    }
    fused = one_f_one_b(SINGLES[:3], costs_of(3), devices=3, microbatches=4)
    assert lines(fused)["2.compute"] == "X2.0 X2.1 X2.2 X2.3"


def test_interleaved_takes_a_group_through_all_stages_of_a_device(costs_of) -> None:
    schedule = interleaved(SINGLES, costs_of(4), devices=2, microbatches=4)
    assert lines(schedule) == {
        "0.compute": (
            "F0.0 F0.1 F2.0 F2.1 F0.2 R4.0 B4.0 F0.3 R4.1 B4.1 F2.2 R6.0 B6.0 F2.3 R6.1 B6.1 "
            "R4.2 B4.2 R4.3 B4.3 R6.2 B6.2 R6.3 B6.3"
        ),
        "1.compute": (
            "F1.0 F1.1 X3.0 X3.1 F1.2 R5.0 B5.0 F1.3 R5.1 B5.1 X3.2 X3.3 R5.2 B5.2 R5.3 B5.3"
        ),
    }


def test_a_recompute_that_waits_starts_when_its_gradient_has_come(costs_of) -> None:
    ahead = gpipe(SINGLES[:2], costs_of(2), devices=2, microbatches=2)
    assert waits(ahead, "R2.0") == ""
    waiting = with_waiting_recompute(ahead)
    assert waits(waiting, "R2.0") == "X1.0"
    assert waits(waiting, "B2.0") == "X1.0"
    assert waiting.streams == ahead.streams
    check([waiting])


def test_1f1b_with_more_stages_than_devices_is_refused(costs_of) -> None:
    with pytest.raises(PlanError, match="4 stages on 3\nhint: schedule=interleaved"):
        one_f_one_b(SINGLES, costs_of(4), devices=3, microbatches=2)


def test_interleaved_with_uneven_numbers_of_stages_is_refused(costs_of) -> None:
    with pytest.raises(PlanError, match="4 stages on 3\nhint: cut into 6 stages"):
        interleaved(SINGLES, costs_of(4), devices=3, microbatches=2)


@pytest.mark.parametrize("generate", ALL)
@pytest.mark.parametrize(
    "stages", [SINGLES[1:], SINGLES[:3], [range(2), range(2, 2), range(2, 4)], []]
)
def test_stages_that_miss_a_layer_or_hold_none_are_refused(costs_of, generate, stages) -> None:
    with pytest.raises(PlanError, match="stages must cover layers 0 to 3, none empty"):
        generate(stages, costs_of(4), devices=4, microbatches=2)


def test_a_loss_without_backward_is_refused_where_nothing_is_trained(costs_of) -> None:
    with pytest.raises(PlanError, match="nothing is trained"):
        gpipe(SINGLES, costs_of(4, trained=[]), devices=4, microbatches=2, fused=False)


def test_what_is_frozen_to_the_bottom_goes_no_way_backward(costs_of) -> None:
    stages = [range(2), range(2, 4)]
    schedule = gpipe(stages, costs_of(4, trained=[1, 3]), devices=2, microbatches=1)
    assert [visit.layers for visit in schedule.visits] == [range(2), range(2, 4), range(1, 2)]
    assert schedule.visits[0].saves == (1, 2)
    assert lines(gpipe(stages, costs_of(4, trained=[3]), devices=2, microbatches=1)) == {
        "0.compute": "F0.0",
        "1.compute": "X1.0",
    }


@st.composite
def stage_cases(draw) -> tuple[list[range], Costs, int, int]:
    """Stages of a few layers of which the lower ones may be frozen, devices, microbatches."""
    sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=6))
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    lowest = draw(st.integers(0, edges[-1] - 1))
    layers = [
        LayerCost(
            forward_seconds=draw(st.integers(1, 2)),
            backward_seconds=draw(st.integers(1, 4)),
            weight_bytes=draw(st.sampled_from([0, 5, 12])) * MIB,
            gradient_bytes=5 * MIB if layer >= lowest else 0,
        )
        for layer in range(edges[-1])
    ]
    costs = Costs(tuple(layers), frozenset(range(lowest, edges[-1])))
    stages = [range(first, stop) for first, stop in pairwise(edges)]
    return stages, costs, draw(st.integers(1, 5)), draw(st.integers(1, 7))


@given(stage_cases(), st.sampled_from(ALL), st.booleans(), st.booleans())
def test_every_weight_bound_schedule_obeys_the_rules_and_ends(
    case, generate, fused: bool, recompute_waits: bool
) -> None:
    stages, costs, devices, microbatches = case
    if generate is one_f_one_b:
        devices = max(devices, len(stages))
    if generate is interleaved and len(stages) % devices:
        devices = 1
    schedule = generate(stages, costs, devices=devices, microbatches=microbatches, fused=fused)
    if recompute_waits:
        schedule = with_waiting_recompute(schedule)
    check([schedule])
    spans = simulate(schedule, compute_seconds(schedule, costs))
    assert len(spans) == sum(len(queue) for queue in schedule.streams.values())
    assert schedule.next_start_device == schedule.start_device == 0
    for visit in schedule.visits:
        assert visit.device == visit.stage % devices


@settings(max_examples=40)
@given(
    case=stage_cases(), generate=st.sampled_from([gpipe, looped_bfs]), staleness=st.integers(0, 1)
)
def test_what_is_breadth_first_lowers_to_steps_that_follow_each_other(
    case, generate, staleness: int, for_ever: Callable
) -> None:
    stages, costs, devices, microbatches = case
    computation = generate(stages, costs, devices=devices, microbatches=microbatches)
    chain = lower_chain(computation, Options(costs=costs, staleness=staleness))
    for count in range(1, len(chain) + 1):
        check(chain[:count])
    check(for_ever(chain[-1]))


@pytest.mark.parametrize("generate", [one_f_one_b, interleaved])
def test_what_interleaves_is_not_lowered(costs_of, generate) -> None:
    computation = generate(SINGLES[:2], costs_of(2), devices=2, microbatches=4)
    with pytest.raises(
        PlanError, match=r"finishes a visit before the next: 0\.compute .*\n.*gpipe"
    ):
        lower_chain(computation, Options(costs=costs_of(2)))


def test_a_loss_that_no_action_brings_down_is_not_lowered(costs_of) -> None:
    computation = gpipe(SINGLES, costs_of(4), devices=2, microbatches=1, fused=False)
    with pytest.raises(PlanError, match="no visit is fused"):
        lower_chain(computation, Options(costs=costs_of(4)))


def test_a_recompute_that_waits_is_not_lowered(costs_of) -> None:
    computation = with_waiting_recompute(gpipe(SINGLES, costs_of(4), devices=2, microbatches=1))
    with pytest.raises(PlanError, match="recompute waits for its gradient"):
        lower_chain(computation, Options(costs=costs_of(4)))


@pytest.mark.parametrize("staleness", [0, 1])
def test_each_wait_of_a_lowered_gpipe_is_needed(costs_of, staleness: int) -> None:
    costs = costs_of(3, weight=12 * MIB)
    computation = gpipe(SINGLES[:3], costs, devices=2, microbatches=2)
    chain = lower_chain(computation, Options(costs=costs, staleness=staleness))
    for action, after in chain[-1].waits.items():
        for wait in after:
            left = tuple(other for other in after if other != wait)
            mutant = replace(chain[-1], waits={**chain[-1].waits, action: left})
            with pytest.raises(PlanError):
                check([*chain[:-1], mutant])
