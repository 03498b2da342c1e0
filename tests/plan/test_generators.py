from dataclasses import replace

import pytest

from roundpipe.errors import PlanError
from roundpipe.plan.generators import (
    Replicas,
    at_start_device,
    computation,
    forward_only,
    round_robin,
    rounds_of,
    shares,
)
from roundpipe.plan.partition import Partition
from roundpipe.plan.schedule import Schedule

THREE = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))


def lines(schedule: Schedule) -> dict[str, str]:
    return {name: " ".join(map(str, queue)) for name, queue in schedule.streams.items()}


def waits(schedule: Schedule) -> dict[str, str]:
    return {str(a): " ".join(map(str, after)) for a, after in schedule.waits.items() if after}


def test_stages_go_round_two_devices(costs_of) -> None:
    schedule = round_robin(THREE, costs_of(3), devices=2, microbatches=2)
    assert lines(schedule) == {
        "0.compute": "F0.0 F0.1 R2.0 B2.0 R2.1 B2.1",
        "1.compute": "X1.0 X1.1 R3.0 B3.0 R3.1 B3.1",
    }
    assert waits(schedule) == {
        "X1.0": "F0.0",
        "X1.1": "F0.1",
        "R2.0": "F0.0",
        "B2.0": "X1.0",
        "R2.1": "F0.1",
        "B2.1": "X1.1",
        "B3.0": "B2.0",
        "B3.1": "B2.1",
    }
    assert [visit.saves for visit in schedule.visits] == [(1, 2), (), (), ()]
    assert [visit.gives_gradient for visit in schedule.visits] == [False, True, True, False]


def test_the_deal_goes_on_in_the_next_step(costs_of) -> None:
    first = round_robin(THREE, costs_of(3), devices=3, microbatches=1)
    assert lines(first) == {
        "0.compute": "F0.0 R3.0 B3.0",
        "1.compute": "X1.0",
        "2.compute": "R2.0 B2.0",
    }
    assert first.next_start_device == 1


def test_more_devices_than_visits_begin_at_the_same_device_again(costs_of) -> None:
    schedule = round_robin(THREE, costs_of(3), devices=5, microbatches=1, start_device=3)
    assert [visit.device for visit in schedule.visits] == [3, 4, 0, 1]
    assert schedule.next_start_device == 3


def test_rounds_follow_each_other_without_a_flush(costs_of) -> None:
    schedule = round_robin(THREE, costs_of(3), devices=3, microbatches=3, rounds=2)
    assert lines(schedule) == {
        "0.compute": "F0.0 F0.1 R3.0 B3.0 R3.1 B3.1 R6.2 B6.2",
        "1.compute": "X1.0 X1.1 F4.2 R7.2 B7.2",
        "2.compute": "R2.0 B2.0 R2.1 B2.1 X5.2",
    }


def test_replicas_share_the_microbatches_of_a_stage(costs_of) -> None:
    schedule = round_robin(
        THREE, costs_of(3), devices=2, microbatches=3, replicas=Replicas(1, 2, 2)
    )
    assert [(v.stage, v.device, v.microbatches) for v in schedule.visits] == [
        (0, 0, (0, 1, 2)),
        (1, 1, (0, 1)),
        (1, 0, (2,)),
        (2, 1, (0, 1)),
        (2, 0, (2,)),
        (3, 1, (0, 1)),
        (3, 0, (2,)),
    ]


def test_nothing_goes_backward_below_the_lowest_trained_layer(costs_of) -> None:
    partition = Partition((range(2),), range(2, 3), (range(1, 2),))
    schedule = round_robin(partition, costs_of(3, trained=[1, 2]), devices=2, microbatches=1)
    assert lines(schedule) == {"0.compute": "F0.0 R2.0 B2.0", "1.compute": "X1.0"}
    assert [visit.gives_gradient for visit in schedule.visits] == [False, True, False]


def test_a_pass_without_gradient_hands_out_its_last_boundary() -> None:
    schedule = forward_only([range(2), range(2, 5)], devices=2, microbatches=2, start_device=1)
    assert lines(schedule) == {"0.compute": "F1.0 F1.1", "1.compute": "F0.0 F0.1"}
    assert [visit.saves for visit in schedule.visits] == [(2,), (5,)]


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5), (9, [1] * 5)]
)
def test_shares_are_even_and_the_first_are_longer(count: int, expected: list[int]) -> None:
    found = shares(range(5), count)
    assert [len(share) for share in found] == expected
    assert [item for share in found for item in share] == list(range(5))


@pytest.mark.parametrize("rounds", [0, 4])
def test_a_round_without_microbatches_is_refused(rounds: int) -> None:
    with pytest.raises(PlanError, match=f"rounds must be between 1 and .*: {rounds}"):
        rounds_of(3, rounds)


def test_a_boundary_that_nobody_saved_is_refused(costs_of) -> None:
    forward, fused, *_ = round_robin(THREE, costs_of(3), devices=1, microbatches=1).visits
    with pytest.raises(PlanError, match=r"X1\.0 needs boundary 2, which nothing hands out"):
        computation([replace(forward, saves=(1,)), fused], devices=1, microbatches=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 1}, "visit 0 is on device 1: there are 1"),
        ({"microbatches": (0, 1)}, r"visit 0 has microbatches \(0, 1\): there are 1"),
        ({"saves": (0, 2)}, r"visit 0 of layers \[0, 1\] saves boundary 0: it hands out what"),
    ],
)
def test_a_visit_made_by_hand_is_refused_for_what_is_wrong_in_it(
    costs_of, change, message: str
) -> None:
    visits = list(round_robin(THREE, costs_of(3), devices=1, microbatches=1).visits)
    visits[0] = replace(visits[0], **change)
    with pytest.raises(PlanError, match=message):
        computation(visits, devices=1, microbatches=1)


def test_a_visit_that_gives_no_gradient_is_told_before_it_runs(costs_of) -> None:
    forward, fused, *rest = round_robin(THREE, costs_of(3), devices=1, microbatches=1).visits
    visits = [forward, replace(fused, gives_gradient=False), *rest]
    with pytest.raises(PlanError, match="needs a gradient of boundary 2 that nothing makes"):
        computation(visits, devices=1, microbatches=1)


def test_a_gradient_that_nobody_made_is_refused(costs_of) -> None:
    forward, _, upper, _ = round_robin(THREE, costs_of(3), devices=1, microbatches=1).visits
    with pytest.raises(PlanError, match=r"B2\.0 needs a gradient of boundary 2 that nothing makes"):
        computation([forward, upper], devices=1, microbatches=1)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_lowered_step_is_the_same_from_every_device_on(small_chain, devices, staleness) -> None:
    first = small_chain(devices=devices, staleness=staleness)[-1]
    for start in range(devices):
        lowered = small_chain(devices=devices, staleness=staleness, start_device=start)[-1]
        renamed = at_start_device(first, start)
        assert dict(renamed.streams) == dict(lowered.streams)
        assert renamed.waits == lowered.waits
        assert renamed.visits == lowered.visits
        assert renamed.start_device == start


def test_devices_change_names_and_nothing_else(costs_of) -> None:
    schedule = round_robin(THREE, costs_of(3), devices=2, microbatches=2)
    assert lines(at_start_device(schedule, 1)) == {
        "0.compute": "X1.0 X1.1 R3.0 B3.0 R3.1 B3.1",
        "1.compute": "F0.0 F0.1 R2.0 B2.0 R2.1 B2.1",
    }
    assert list(at_start_device(schedule, 1).streams) == ["0.compute", "1.compute"]
    assert at_start_device(at_start_device(schedule, 1), 0) == schedule
