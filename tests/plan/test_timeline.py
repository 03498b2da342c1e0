import pytest

from roundpipe.plan.actions import Action
from roundpipe.plan.timeline import Span, busy_share


def span(stream: str, start: float, end: float) -> Span:
    return Span(stream, Action.parse("F0.0"), start, end)


def test_busy_share_is_of_the_time_in_which_anything_computes() -> None:
    spans = [span("0.compute", 1, 3), span("1.compute", 2, 5), span("0.weights", 0, 9)]
    assert busy_share(spans) == {"0.compute": pytest.approx(0.5), "1.compute": pytest.approx(0.75)}


def test_nothing_computed_is_nobody_busy() -> None:
    assert busy_share([span("0.weights", 0, 1)]) == {}


def test_work_without_length_is_all_busy() -> None:
    assert busy_share([span("0.compute", 1, 1)]) == {"0.compute": 1.0}
