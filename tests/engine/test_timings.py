"""What a run keeps for the timeline: every action, where it ran, and when."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from roundpipe.engine.program import HOST, Item
from roundpipe.engine.run import Timings
from roundpipe.plan.actions import Action
from roundpipe.plan.timeline import Span


def item(stream, text):
    return Item(Action.parse(text), stream, ())


def test_an_action_is_told_once_it_is_over_and_its_events_are_let_go():
    timings = Timings(7, ())
    asked = []

    class Under:
        """Under way until ``over``."""

        over = False

        @property
        def start_seconds(self):
            asked.append(1)
            return 1.0 if self.over else math.nan

        @property
        def end_seconds(self):
            return 2.0 if self.over else math.nan

    first, second = Under(), Under()
    timings.add(1, item("weights", "U0#0"), first)
    timings.add(HOST, item("host", "S3"), second)
    assert timings.spans() == []
    second.over = True
    assert timings.spans() == [Span("host", Action.parse("S3"), 1.0, 2.0)]
    first.over = True
    spans = timings.spans()
    assert [(str(span.action), span.stream) for span in spans] == [
        ("U0#0", "1.weights"),
        ("S3", "host"),
    ]
    count = len(asked)
    assert timings.spans() == spans
    assert len(asked) == count  # what is over is not asked again: it may be a card's event
    assert timings.as_step().step == 7
    assert timings.as_step().spans == tuple(spans)


def test_actions_may_be_added_while_others_are_read():
    timings = Timings(0, ())

    class Adding:
        end_seconds = 1.0

        @property
        def start_seconds(self):
            if len(timings._kept) < 3:
                timings.add(
                    0, item("compute", "F0.1"), SimpleNamespace(start_seconds=1, end_seconds=2)
                )
            return 0.0

    timings.add(0, item("compute", "F0.0"), Adding())
    assert len(timings.spans()) == len(timings._kept) == 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_timeline_holds_every_action_of_a_step_after_all_it_waited_for(rig, staleness):
    trainer = rig.trainer(["cpu", "cpu"], staleness=staleness, clip=1.0)
    schedules = []
    trainer.use_schedule(lambda schedule: schedules.append(schedule) or schedule)
    trainer.train(4)
    trainer.pipe.synchronize()
    timeline = trainer.pipe.timeline
    assert [step.step for step in timeline.steps] == [0, 1, 2, 3]
    assert timeline.devices == ("cpu:0", "cpu:1")
    assert timeline.layers == tuple(str(layer) for layer in range(5))
    ends = {}
    for step in timeline.steps:
        ran = {(span.stream, span.action) for span in step.spans}
        assert len(ran) == len(step.spans)
        schedule, *_ = (  # the first step is of another kind where weights get old
            schedule
            for schedule in schedules
            if schedule.visits == step.visits and set(schedule.actions()) == ran
        )
        before, ends = ends, {span.action: span.end for span in step.spans}
        for span in step.spans:
            for wait in schedule.waits.get(span.action, ()):
                known = before.get(wait.of_this_step(), 0.0) if wait.before else ends[wait]
                assert span.start >= known, (span.action, wait)
    assert len(timeline.spans) == sum(len(step.spans) for step in timeline.steps)


def test_what_failed_is_forgotten_but_not_before_the_next_call(rig):
    trainer = rig.trainer(["cpu", "cpu"])
    trainer.train(2)

    def fail(outputs, labels):
        raise KeyboardInterrupt

    good, trainer.loss_fn = trainer.loss_fn, fail
    with pytest.raises(KeyboardInterrupt):
        trainer.call()
    assert [step.step for step in trainer.pipe.timeline.steps] == [0, 1, 2]
    trainer.loss_fn = good
    trainer.train(1)
    # Made again, with the number of the one that was lost: it draws what that would have drawn.
    assert [step.step for step in trainer.pipe.timeline.steps] == [2]
