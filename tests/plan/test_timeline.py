import pytest

from roundpipe.plan.actions import Action
from roundpipe.plan.schedule import Phase, Schedule, Visit
from roundpipe.plan.timeline import Span, Timeline, busy_share


def span(stream: str, start: float, end: float) -> Span:
    return Span(stream, Action.parse("F0.0"), start, end)


def test_busy_share_is_of_the_time_in_which_anything_computes() -> None:
    spans = [span("0.compute", 1, 3), span("1.compute", 2, 5), span("0.weights", 0, 9)]
    assert busy_share(spans) == {"0.compute": pytest.approx(0.5), "1.compute": pytest.approx(0.75)}


def test_nothing_computed_is_nobody_busy() -> None:
    assert busy_share([span("0.weights", 0, 1)]) == {}


def test_work_without_length_is_all_busy() -> None:
    assert busy_share([span("0.compute", 1, 1)]) == {"0.compute": 1.0}


def test_the_spans_of_a_chain_are_sorted_by_steps_whatever_their_order() -> None:
    visit = Visit(0, 0, Phase.FUSED, range(2), 0, (0, 1))
    actions = [Action.parse(text) for text in ("X0.0", "X0.1")]
    streams = {"0.compute": tuple(actions)}
    chain = [Schedule((visit,), streams, {}, 1, 2) for _ in range(3)]
    spans = [
        Span("0.compute", actions[0], 0, 1),
        Span("0.compute", actions[0], 1, 2),  # a step may begin before the one before has ended
        Span("0.compute", actions[1], 2, 3),
        Span("0.compute", actions[1], 3, 4),
        Span("0.compute", actions[0], 4, 5),
    ]
    timeline = Timeline.of(chain, spans, devices=["cpu"], layers=["a", "b"], first_step=5)
    assert [step.step for step in timeline.steps] == [5, 6, 7]
    assert [list(step.spans) for step in timeline.steps] == [
        [spans[0], spans[2]],
        [spans[1], spans[3]],
        [spans[4]],
    ]
    assert timeline.steps[0].visits == (visit,)
    assert timeline.spans == [spans[0], spans[2], spans[1], spans[3], spans[4]]
    assert (timeline.devices, timeline.layers) == (("cpu",), ("a", "b"))
