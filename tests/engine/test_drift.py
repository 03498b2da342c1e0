"""A plan is looked at again when visits' shares of a step have moved, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundpipe.engine.drift import DriftWatch
from roundpipe.engine.measure import drift
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.timeline import Span


def timings(*seconds):
    spans = [
        Span("0.compute", Action(Op.FORWARD, visit, 0), 0.0, each)
        for visit, each in enumerate(seconds)
    ]
    return SimpleNamespace(spans=lambda: spans)


UNDER_WAY = timings()


def looks(watch, kinds_and_steps):
    """At which of so many runs a drift is found."""
    found = []
    for number, (kind, step) in enumerate(kinds_and_steps, 1):
        if watch.has_drifted(kind, [step, UNDER_WAY]):
            found.append(number)
    return found


AS_PLANNED, SLOWER = timings(1.0, 1.0), timings(3.0, 3.0)
FAR, NEAR = timings(1.0, 2.0), timings(1.0, 1.1)


def test_shares_that_have_moved_are_found_after_three_looks():
    steps = [("a", AS_PLANNED)] * 15 + [("a", FAR)] * 60
    assert looks(DriftWatch(), steps) == [40]  # looked at every tenth: 20, 30, 40; then anew


@pytest.mark.parametrize("step", [AS_PLANNED, SLOWER, NEAR])
def test_what_is_slower_as_a_whole_or_by_little_is_no_drift(step):
    assert looks(DriftWatch(), [("a", AS_PLANNED)] * 15 + [("a", step)] * 60) == []


def test_single_slow_steps_are_no_drift():
    once = [("a", FAR)] * 10 + [("a", AS_PLANNED)] * 10
    assert looks(DriftWatch(), [("a", AS_PLANNED)] * 10 + once * 4) == []


def test_another_kind_of_step_is_looked_at_by_itself():
    assert looks(DriftWatch(), [("a", AS_PLANNED)] * 12 + [("b", FAR)] * 60) == []


def test_drift_is_the_share_that_would_have_to_move():
    before = {(0, Op.FORWARD): 1.0, (1, Op.FUSED): 3.0}
    assert drift(before, {(0, Op.FORWARD): 2.0, (1, Op.FUSED): 6.0}) == 0
    assert drift(before, {(0, Op.FORWARD): 2.0, (1, Op.FUSED): 2.0}) == pytest.approx(0.25)
    assert drift(before, {}) == 0
