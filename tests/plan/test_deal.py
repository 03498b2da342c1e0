"""Who gets which stage: in turn, or whoever is free first; shared evenly, or by speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, at_start_device, replicated, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.simulate import compute_seconds, makespan, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.schedule import Schedule

MIB = 1 << 20
SIX = Partition(
    (range(2), range(2, 5)), range(5, 6), (range(4, 5), range(3, 4), range(1, 3), range(1))
)


def dealt(schedule: Schedule) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(visit.stage, visit.device, visit.microbatches) for visit in schedule.visits]


def seconds_of(schedule: Schedule, costs: Costs, speeds: Sequence[float]) -> dict[int, float]:
    """Seconds of work that each device does."""
    seconds = at_speeds(schedule, costs, speeds)
    work = dict.fromkeys(range(schedule.num_devices), 0.0)
    for visit in schedule.visits:
        for microbatch in visit.microbatches:
            work[visit.device] += sum(map(seconds, visit.compute(microbatch)))
    return work


def at_speeds(schedule: Schedule, costs: Costs, speeds: Sequence[float]):
    alike = compute_seconds(schedule, costs)

    def seconds(action: Action) -> float:
        return alike(action) / speeds[schedule.visits[action.index].device]

    return seconds


def test_every_device_runs_every_stage_on_its_share(costs_of) -> None:
    partition = Partition((range(1),), range(1, 2), (range(1),))
    schedule = replicated(partition, costs_of(2), devices=2, microbatches=3)
    assert dealt(schedule) == [
        (0, 0, (0, 1)),
        (0, 1, (2,)),
        (1, 0, (0, 1)),
        (1, 1, (2,)),
        (2, 0, (0, 1)),
        (2, 1, (2,)),
    ]


def test_the_ramp_runs_on_devices_of_its_own_number(costs_of) -> None:
    schedule = round_robin(
        SIX,
        costs_of(6),
        devices=4,
        microbatches=4,
        rounds=2,
        replicas=Replicas(fused=3, ramp=2, ramp_stages=1),
    )
    copies = [[v.stage for v in schedule.visits].count(stage) for stage in range(7)]
    # Forward 0 in the first round and backward 6 in the second are on two devices.
    assert copies == [3, 2, 4, 2, 2, 2, 3]
    assert [v.stage for v in schedule.visits][:3] == [0, 0, 1]
    assert [v.stage for v in schedule.visits][-3:] == [5, 6, 6]


def test_who_has_less_to_do_is_dealt_to_before_the_next_in_turn(costs_of) -> None:
    partition = Partition((range(1), range(1, 2)), range(2, 3), ())
    costs, copies = costs_of(3, trained=[2]), Replicas(2, 1, 1)
    cyclic = round_robin(partition, costs, devices=3, microbatches=3, replicas=copies)
    earliest = round_robin(
        partition, costs, devices=3, microbatches=3, replicas=copies, deal="earliest"
    )
    assert dealt(cyclic)[:4] == [(0, 0, (0, 1)), (0, 1, (2,)), (1, 2, (0, 1)), (1, 0, (2,))]
    assert dealt(earliest)[:4] == [(0, 0, (0, 1)), (0, 1, (2,)), (1, 2, (0, 1)), (1, 1, (2,))]


def test_of_devices_free_at_once_the_next_from_the_start_device_is_taken(costs_of) -> None:
    costs, copies = costs_of(6), Replicas(4, 4, 4)
    schedule = round_robin(
        SIX, costs, devices=4, microbatches=4, replicas=copies, deal="earliest", start_device=3
    )
    assert [visit.device for visit in schedule.visits] == [3, 0, 1, 2] * 7
    for start in range(3):
        kind = {"devices": 3, "microbatches": 4, "deal": "earliest"}
        first = round_robin(SIX, costs, **kind)
        assert round_robin(SIX, costs, **kind, start_device=start) == at_start_device(first, start)


def test_what_is_dealt_to_the_earliest_begins_each_step_alike(costs_of) -> None:
    schedule = round_robin(SIX, costs_of(6), devices=3, microbatches=4, deal="earliest")
    assert schedule.next_start_device == schedule.start_device
    assert round_robin(SIX, costs_of(6), devices=3, microbatches=4).next_start_device == 1


def test_devices_of_unequal_speed_begin_each_round_and_step_alike(costs_of) -> None:
    schedule = round_robin(
        SIX, costs_of(6), devices=3, microbatches=4, rounds=2, speeds=[1.0, 2.0, 1.0]
    )
    assert [visit.device for visit in schedule.visits] == [0, 1, 2, 0, 1, 2, 0] * 2
    assert schedule.next_start_device == 0


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 1.0, 1.0]])
def test_speeds_are_one_a_device(costs_of, speeds: list[float]) -> None:
    with pytest.raises(PlanError, match="speeds must be one a device, of 2"):
        round_robin(SIX, costs_of(6), devices=2, microbatches=2, speeds=speeds)


def test_a_device_that_stands_still_is_refused(costs_of) -> None:
    with pytest.raises(PlanError, match="speeds must be above 0"):
        round_robin(SIX, costs_of(6), devices=2, microbatches=2, speeds=[1.0, 0.0], deal="earliest")


@pytest.mark.parametrize(("speeds", "share"), [((2.0, 1.0), 2 / 3), ((3.0, 1.0), 3 / 4)])
def test_a_device_twice_as_fast_gets_about_twice_the_work(costs_of, speeds, share: float) -> None:
    costs = costs_of(6)
    schedule = round_robin(
        SIX,
        costs,
        devices=2,
        microbatches=12,
        replicas=Replicas(2, 2, 2),
        speeds=speeds,
        deal="earliest",
    )
    layers = [len(v.layers) * len(v.microbatches) for v in schedule.visits]
    on_first = sum(n for n, v in zip(layers, schedule.visits, strict=True) if v.device == 0)
    assert on_first / sum(layers) == pytest.approx(share, abs=0.03)
    busy = seconds_of(schedule, costs, speeds)
    length = makespan(simulate(schedule, at_speeds(schedule, costs, speeds)))
    assert min(busy.values()) > 0.93 * length


def test_who_is_free_later_takes_less_of_the_next_stage(costs_of) -> None:
    """Seven microbatches on three devices: one has one more, and the next stage evens it out."""
    costs = costs_of(6)
    even = replicated(SIX, costs, devices=3, microbatches=7)
    copies = Replicas(3, 3, 3)
    evened = round_robin(SIX, costs, devices=3, microbatches=7, replicas=copies, deal="levelled")
    length = [makespan(simulate(s, at_speeds(s, costs, (1, 1, 1)))) for s in (even, evened)]
    assert length[1] < 0.95 * length[0]


def test_levelled_shares_make_up_for_the_ramp(costs_of) -> None:
    costs, copies = costs_of(6), Replicas(1, 3, 3)
    sizes = {}
    for deal in ("earliest", "levelled"):
        schedule = round_robin(SIX, costs, devices=3, microbatches=9, replicas=copies, deal=deal)
        sizes[deal] = [len(v.microbatches) for v in schedule.visits if v.stage == 2]
    # Device 2 has run no forward stage, 0 one of 2 layers, 1 one of 3 layers behind it.
    assert sizes == {"earliest": [3, 3, 3], "levelled": [7, 2]}


@st.composite
def deals(draw) -> tuple[Schedule, Costs]:
    """Round-robin of every kind over six layers of uneven costs."""
    layers = [
        LayerCost(
            forward_seconds=draw(st.sampled_from([0.0, 1.0, 2.5])),
            backward_seconds=draw(st.sampled_from([1.0, 2.5])),
            weight_bytes=draw(st.sampled_from([0, 5, 12])) * MIB,
            gradient_bytes=draw(st.sampled_from([1, 12])) * MIB,
        )
        for _ in range(6)
    ]
    costs = Costs(tuple(layers), frozenset(range(6)))
    devices, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    copies = st.sampled_from([1, 2, 3, 8])
    speed = st.sampled_from([1.0, 1.02, 2.0])
    schedule = round_robin(
        SIX,
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=draw(st.integers(1, min(2, microbatches))),
        replicas=Replicas(
            draw(copies), draw(copies), draw(copies), draw(copies), draw(st.integers(0, 2))
        ),
        deal=draw(st.sampled_from(["cyclic", "earliest", "levelled"])),
        speeds=draw(st.none() | st.tuples(*[speed] * devices)),
    )
    return schedule, costs


@settings(max_examples=25)
@given(case=deals(), staleness=st.integers(0, 1))
def test_whatever_is_dealt_lowers_and_follows_itself(
    case, staleness: int, for_ever: Callable
) -> None:
    computation, costs = case
    check([computation])
    chain = lower_chain(computation, Options(costs=costs, staleness=staleness))
    for count in range(1, len(chain) + 1):
        check(chain[:count])
    check(for_ever(chain[-1]))


@given(case=deals())
def test_a_stage_runs_each_microbatch_once_and_on_a_device_once(case) -> None:
    computation, _ = case
    rounds: dict[tuple[int, int], int] = {}
    for visit in computation.visits:
        for microbatch in visit.microbatches:
            key = (visit.stage, microbatch)
            rounds[key] = rounds.get(key, 0) + 1
    assert set(rounds.values()) == {1}
    assert len(rounds) == 7 * computation.num_microbatches
