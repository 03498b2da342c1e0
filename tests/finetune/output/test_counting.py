from __future__ import annotations

import io
from itertools import count
from typing import Any

import pytest

from roundpipe.finetune.output.counting import Counting
from roundpipe.finetune.output.terminal import Terminal


def shown(
    *done: int, total: int = 4_500_000_000, unit: str = "B", is_tty: bool = True
) -> list[str]:
    written: list[str] = []
    ticks = count(100.0)  # a clock that goes on by a second whenever it is asked
    show = Counting(
        "loading x",
        total,
        unit,
        write=written.append,
        is_tty=is_tty,
        patience=2.0,
        now=lambda: next(ticks),
    )
    for each in done:
        show(each)
    return written


def test_nothing_is_shown_before_patience_ends_then_what_is_done_and_the_time_left() -> None:
    assert shown(0, 500_000_000, 1_500_000_000, 4_500_000_000) == [
        "loading x: 0.5/4.5 GB · 0:08 left",
        "loading x: 1.5/4.5 GB · 0:04 left",
        "loading x: 4.5/4.5 GB",
    ]


def test_what_was_there_already_counts_for_no_speed() -> None:
    assert shown(4_000_000_000, 4_100_000_000)[-1] == "loading x: 4.1/4.5 GB · 0:04 left"


def test_lines_that_stay_come_now_and_then() -> None:
    assert len(shown(*range(1, 60), total=100, unit="samples", is_tty=False)) == 3


def test_other_units_are_counted_one_by_one_and_a_total_may_be_unknown() -> None:
    assert shown(0, 1200, total=9000, unit="samples") == [
        "loading x: 1,200/9,000 samples · 0:06 left"
    ]
    assert shown(0, 1200, total=0, unit="samples") == ["loading x: 1,200 samples"]
    assert shown(0, 1_200_000, total=0) == ["loading x: 1.2 MB"]


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Tty()])
def test_a_terminal_rewrites_its_line_and_other_places_get_lines(stream: Any) -> None:
    with Terminal(stream, patience=0.0).counting("loading x", 3, "files") as show:
        show(1)
    written = stream.getvalue()
    assert "loading x: 1/3 files" in written
    assert ("\r\x1b[Kloading x: 1/3 files" in written) == isinstance(stream, Tty)
    assert written.splitlines()[-1].endswith(" s")
