"""Transfers under way: how fast each goes, and which ends first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.sim.sharing import Road, Sharing

_LEAST = 1e-6  # bytes: what is left of a transfer that is about to end


class Flows:
    """Feed it starts and ends in the order of time; rates change with each."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._left: dict[int, float] = {}  # flow -> bytes
        self._roads: dict[int, Road] = {}
        self._rates: dict[int, float] = {}
        self._at = 0.0  # up to when bytes have been counted
        self._first: tuple[float, int] | None = (math.inf, -1)
        self._known: dict[tuple[Road, ...], list[float]] = {}

    def start(self, flow: int, num_bytes: float, road: Road, now: float) -> None:
        """Begin a transfer."""
        self._count(now)
        self._left[flow], self._roads[flow] = num_bytes, road
        self._first = None

    def end(self, flow: int, now: float) -> None:
        """A transfer is over."""
        self._count(now)
        del self._left[flow], self._roads[flow]
        self._first = None

    def first(self) -> tuple[float, int]:
        """When the next transfer ends at today's rates, and which; (inf, -1) if none is under way.

        Of those that end together the one that began first.
        """
        if self._first is None:
            self._first = self._find()
        return self._first

    def _find(self) -> tuple[float, int]:
        roads = tuple(self._roads.values())
        rates = self._known.get(roads)
        if rates is None:
            rates = self._known[roads] = self._sharing.rates(roads)
        self._rates = dict(zip(self._left, rates, strict=True))
        when, first = math.inf, -1
        for (flow, left), rate in zip(self._left.items(), rates, strict=True):
            end = self._at + left / rate
            if end < when:
                when, first = end, flow
        return when, first

    def _count(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            for flow, rate in self._rates.items():
                self._left[flow] = max(self._left[flow] - rate * passed, _LEAST)
            self._at = now
            self._first = None
