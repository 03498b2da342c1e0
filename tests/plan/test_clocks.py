import pytest

from roundpipe.errors import DeadlockError
from roundpipe.plan.actions import Action
from roundpipe.plan.clocks import Clocks, order_by_start, play


def parse(text: str) -> Action:
    return Action.parse(text)


def queues(**streams: str) -> dict[str, list[Action]]:
    return {name: list(map(parse, text.split())) for name, text in streams.items()}


def waits(**after: str) -> dict[Action, list[Action]]:
    return {
        parse(action.replace("_", ".")): list(map(parse, text.split()))
        for action, text in after.items()
    }


def test_a_clock_covers_what_streams_and_waits_put_before() -> None:
    clocks = Clocks()
    a, b, c = ((0, parse(text)) for text in ("F0.0", "F0.1", "X1.0"))
    clocks.add(a, "0", ())
    clocks.add(b, "0", ())
    started = clocks.add(c, "1", [a])
    assert started == {"0": 1}
    assert clocks.covers(started, a)
    assert not clocks.covers(started, b)
    assert clocks.covers(started, (0, parse("F9.9")))  # what never ran


def test_only_waits_that_nothing_implies_are_essential() -> None:
    clocks = Clocks()
    a, b, c = ((0, parse(text)) for text in ("F0.0", "a0.0", "A1.0"))
    clocks.add(a, "0", ())
    clocks.add(b, "down", [a])
    clocks.add(c, "up", [b])
    assert clocks.essential("1", [a, b, c]) == [c]
    assert clocks.essential("0", [a, b]) == [b]
    assert clocks.essential("up", [a, b, c]) == []


def test_play_is_the_longest_path() -> None:
    found = play(
        queues(one="F0.0 F0.1", two="X1.0 X1.1"), waits(X1_0="F0.0", X1_1="F0.1"), lambda _: 2.0
    )
    assert {str(action): (start, end) for action, start, end in found} == {
        "F0.0": (0, 2),
        "F0.1": (2, 4),
        "X1.0": (2, 4),
        "X1.1": (4, 6),
    }


def test_an_action_without_length_is_ordered_before_what_waits_for_it() -> None:
    streams = queues(two="X1.0", one="F0.0")
    order = order_by_start(streams, waits(X1_0="F0.0"), lambda _: 0.0)
    assert list(map(str, order)) == ["F0.0", "X1.0"]


def test_a_circle_is_told_with_the_heads_of_streams() -> None:
    streams = queues(one="F0.0 F0.1", two="X1.0")
    with pytest.raises(DeadlockError, match=r"\{'one': 'F0\.1', 'two': 'X1\.0'\}"):
        list(play(streams, waits(F0_1="X1.0", X1_0="F0.1"), lambda _: 1.0))
