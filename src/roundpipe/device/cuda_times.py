"""When a card ran a work, on the host's clock: worked out from events the card has passed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


class Stamp(Protocol):
    """A CUDA event that keeps its time."""

    def query(self) -> bool:
        """Whether the card has passed it."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from it to ``end_event``; both must have been passed."""
        ...


@dataclass(frozen=True)
class Origin:
    """An event the card has passed, and when that was on the host's clock."""

    event: Stamp
    seconds: float

    def seconds_of(self, event: Stamp) -> float:
        """When the card passed ``event``; it must have."""
        return self.seconds + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True)
class CudaTiming:
    """When one work ran on the card, on the host's clock; NaN until it has completed."""

    origin: Origin
    start: Stamp
    end: Stamp

    @property
    def start_seconds(self) -> float:
        """See Timing."""
        return self.origin.seconds_of(self.start) if self.end.query() else math.nan

    @property
    def end_seconds(self) -> float:
        """See Timing."""
        start = self.start_seconds
        return start if math.isnan(start) else start + self.start.elapsed_time(self.end) / 1e3
