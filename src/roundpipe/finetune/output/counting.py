"""A line for something that takes long and knows how far it is: done, in all, time left.

A terminal gets one line that is rewritten in place, everything else a plain line now and then.
Below the patience of whoever waits nothing is shown at all.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from roundpipe.finetune.output.progress import clock

if TYPE_CHECKING:
    from collections.abc import Callable

_BETWEEN_REWRITES = 0.1  # seconds
_BETWEEN_LINES = 20.0  # seconds, where lines stay
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Counting:
    """Shows how far something is. Called from any thread, as often as one likes.

    ``total``: in ``unit``; 0 or less: not known. ``unit``: "B" for bytes, else the plural of what
    is counted. ``write`` shows a text in place where ``is_tty``, else as a line of its own.
    """

    def __init__(  # noqa: PLR0913 - what is counted, and where and when it is shown
        self,
        what: str,
        total: int,
        unit: str,
        *,
        write: Callable[[str], None],
        is_tty: bool,
        patience: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._write, self._now = write, now
        self._pause = _BETWEEN_REWRITES if is_tty else _BETWEEN_LINES
        self._started = now()
        self._next = self._started + patience
        self._first: int | None = None  # what was there already counts for no speed
        self._lock = threading.Lock()

    def __call__(self, done: int) -> None:
        """Say that ``done`` of all is done; shown if it is time to."""
        now = self._now()
        with self._lock:
            if self._first is None:
                self._first, self._started = done, now
            if now < self._next:
                return
            self._next = now + self._pause
        self._write(self.text(done, now - self._started))

    def text(self, done: int, seconds: float) -> str:
        """``loading x: 1.2/4.5 GB · 0:38 left``."""
        if self._total <= 0:
            return f"{self._what}: {_amounts(done, None, self._unit)}"
        parts = [f"{self._what}: {_amounts(done, self._total, self._unit)}"]
        made = done - (self._first or 0)
        if made > 0 and done < self._total:
            parts.append(f"{clock(seconds * (self._total - done) / made)} left")
        return " · ".join(parts)


def _amounts(done: int, total: int | None, unit: str) -> str:
    """Both numbers in the unit of the larger."""
    of = done if total is None else total
    factor, prefix = 1.0, ""
    if unit == "B":
        factor, prefix = next(((f, p) for f, p in _PREFIXES if of >= f), (1.0, ""))
    numbers = [done] if total is None else [done, total]
    shown = [f"{n / factor:.1f}" if factor > 1 else f"{n:,}" for n in numbers]
    return f"{'/'.join(shown)} {prefix}{unit}"
