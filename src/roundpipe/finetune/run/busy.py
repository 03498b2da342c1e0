"""How busy the devices were lately: the share of time in which their compute streams worked."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roundpipe.plan.timeline import Span

_SHORTEST_WINDOW = 0.5  # seconds; a shorter one says little, and asking costs


class BusyMeter:
    """Tells the busy share since it was last asked, averaged over ``num_devices`` devices.

    ``spans`` gives what ran when, in seconds of ``time.perf_counter``.
    """

    def __init__(self, spans: Callable[[], Iterable[Span]], num_devices: int) -> None:
        self._spans = spans
        self._num_devices = num_devices
        self._since = time.perf_counter()
        self._share: float | None = None

    def share(self) -> float | None:
        """0 to 1; the last answer while too little time has gone by, None before the first."""
        now = time.perf_counter()
        if now - self._since >= _SHORTEST_WINDOW:
            worked = math.fsum(
                max(0.0, min(span.end, now) - max(span.start, self._since))
                for span in self._spans()
                if span.stream.endswith(".compute")
            )
            self._share = min(1.0, worked / ((now - self._since) * self._num_devices))
            self._since = now
        return self._share

    def skip(self) -> None:
        """Leave out the time since it was last asked."""
        self._since = time.perf_counter()
