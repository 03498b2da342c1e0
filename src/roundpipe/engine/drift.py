"""Watches whether steps still take what they took when their plan was new.

Looked at is every tenth run, and only how a step's time is shared among its visits: that everything
has become slower is no reason for another plan, nor is one slow step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.engine.measure import drift, visit_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from roundpipe.engine.run import Timings
    from roundpipe.plan.actions import Op

_EVERY = 10  # runs from look to look
_MOST = 0.10  # of a step's time that may have moved from visit to visit
_LOOKS = 3  # in a row that must find so much


class DriftWatch:
    """See the module docstring. One step's drift is told from the first look at its kind."""

    def __init__(self) -> None:
        self._num_runs = self._num_far = 0
        self._kind: Hashable = None
        self._first: Mapping[tuple[int, Op], float] | None = None

    def has_drifted(self, kind: Hashable, timings: Sequence[Timings]) -> bool:
        """Count a run of ``kind``; ``timings`` are the last runs', of which the last may go on."""
        self._num_runs += 1
        if kind != self._kind:
            self._kind, self._first, self._num_far = kind, None, 0
        if self._num_runs % _EVERY or len(timings) < 2:
            return False
        now = visit_seconds(timings[-2])
        if self._first is None or self._first.keys() != now.keys():
            self._first, self._num_far = now, 0
            return False
        self._num_far = self._num_far + 1 if drift(self._first, now) > _MOST else 0
        if self._num_far < _LOOKS:
            return False
        self._first, self._num_far = None, 0
        return True
