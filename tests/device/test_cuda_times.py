"""When a card ran a work, from events whose times are invented."""

from __future__ import annotations

import math

import pytest

from roundpipe.device.cuda_times import CudaTiming, Origin


class Event:
    """A card's event, passed at ``milliseconds``; None: not yet."""

    def __init__(self, milliseconds: float | None) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds is not None

    def elapsed_time(self, later: Event) -> float:
        if self.milliseconds is None or later.milliseconds is None:
            raise ValueError("both events must be completed")  # as torch does
        return later.milliseconds - self.milliseconds


def test_the_times_of_work_under_way_are_not_a_number() -> None:
    origin = Origin(Event(0.0), 10.0)
    start, end = Event(2000.0), Event(None)
    timing = CudaTiming(origin, start, end)
    assert math.isnan(timing.start_seconds)
    assert math.isnan(timing.end_seconds)
    end.milliseconds = 2500.0
    assert timing.start_seconds == pytest.approx(12.0)
    assert timing.end_seconds == pytest.approx(12.5)
