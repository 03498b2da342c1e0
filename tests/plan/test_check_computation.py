"""Every rule of a schedule that is not lowered is seen to fail on one that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action
from roundpipe.plan.baselines import gpipe, one_f_one_b
from roundpipe.plan.check import COMPUTATION, check, compute_follows_what_it_reads
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition

TWO = [range(1), range(1, 2)]
THREE = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))


@pytest.fixture
def schedule(costs_of):
    """F0.0 F0.1 R2.0 B2.0 R2.1 B2.1 on device 0, X1.0 X1.1 on device 1."""
    return gpipe(TWO, costs_of(2), devices=2, microbatches=2)


def with_stream(schedule, name: str, text: str):
    queue = tuple(map(Action.parse, text.split()))
    return replace(schedule, streams={**schedule.streams, name: queue})


def with_waits(schedule, action: str, *after: str):
    waits = {Action.parse(action): tuple(map(Action.parse, after))}
    return replace(schedule, waits={**schedule.waits, **waits})


def broken_rules(schedule) -> set[str]:
    with pytest.raises(PlanError) as caught:
        check([schedule])
    return {line.split(":")[0] for line in str(caught.value).splitlines() if ": " in line}


def test_a_computation_is_looked_at_alone(schedule, costs_of) -> None:
    check([schedule])
    check([schedule, schedule])
    assert not schedule.is_lowered
    check([one_f_one_b(TWO, costs_of(2), devices=2, microbatches=5, fused=False)])


def test_an_action_that_stands_twice(schedule) -> None:
    twice = with_stream(schedule, "1.compute", "X1.0 X1.1 X1.0")
    assert "each_action_once" in broken_rules(twice)


def test_a_wait_for_what_nothing_runs(schedule) -> None:
    assert "waits_are_scheduled" in broken_rules(with_waits(schedule, "X1.0", "F9.0"))


def test_a_circle_of_waits(schedule) -> None:
    assert "nothing_waits_in_a_circle" in broken_rules(with_waits(schedule, "F0.0", "B2.1"))


def test_a_microbatch_that_misses_a_visit(schedule) -> None:
    visits = (replace(schedule.visits[0], microbatches=(0,)), *schedule.visits[1:])
    rules = broken_rules(replace(schedule, visits=visits))
    assert "every_microbatch_goes_through_every_layer" in rules


def test_an_action_that_is_left_out(schedule) -> None:
    assert "visits_run_whole" in broken_rules(with_stream(schedule, "1.compute", "X1.0"))


def test_visits_may_take_turns_only_where_their_layers_run_nowhere_else(costs_of, schedule) -> None:
    check([with_stream(schedule, "0.compute", "F0.0 R2.0 B2.0 F0.1 R2.1 B2.1")])
    dealt = round_robin(THREE, costs_of(3), devices=2, microbatches=2)
    check([dealt])
    in_turn = with_stream(dealt, "0.compute", "F0.0 R2.0 F0.1 B2.0 R2.1 B2.1")
    assert "only_stages_that_stay_interleave" in broken_rules(in_turn)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("X1.1", "X1.1 on 1.compute reads ('boundary', 1, 1) without waiting for F0.1"),
        ("B2.0", "B2.0 on 0.compute reads ('boundary_gradient', 1, 0) without waiting for X1.0"),
    ],
)
def test_a_result_that_is_not_awaited(schedule, action: str, message: str) -> None:
    broken = with_waits(schedule, action)
    assert broken_rules(broken) == {"compute_follows_what_it_reads"}
    with pytest.raises(PlanError, match="compute_follows") as caught:
        check([broken])
    assert message in str(caught.value)


def test_a_backward_in_front_of_its_recompute(schedule) -> None:
    turned = with_stream(schedule, "0.compute", "F0.0 F0.1 B2.0 R2.0 R2.1 B2.1")
    assert broken_rules(turned) == {"compute_follows_what_it_reads"}


def test_a_boundary_that_nobody_saves(schedule) -> None:
    visits = (replace(schedule.visits[0], saves=()), *schedule.visits[1:])
    with pytest.raises(PlanError, match=r"reads \('boundary', 1, 0\) without waiting for a maker"):
        check([replace(schedule, visits=visits)])


def test_a_last_stage_that_is_not_fused_awaits_its_own_loss(costs_of) -> None:
    apart = gpipe(TWO, costs_of(2), devices=2, microbatches=2, fused=False)
    check([apart])
    turned = with_stream(apart, "1.compute", "R2.0 B2.0 F1.0 F1.1 R2.1 B2.1")
    assert broken_rules(with_waits(turned, "B2.0")) == {"compute_follows_what_it_reads"}


def test_every_rule_has_a_docstring_of_a_sentence() -> None:
    for rule in (*COMPUTATION, compute_follows_what_it_reads):
        assert rule.__doc__ is not None
        assert rule.__doc__.split("\n\n")[0].rstrip().endswith(".")
