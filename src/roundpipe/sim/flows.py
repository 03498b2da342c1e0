"""Transfers under way: how fast each goes, and which ends first."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.sim.sharing import Road, Sharing


class Flows:
    """Feed it starts and ends in the order of time; rates change with each.

    A link has one copy engine each way: what comes while it is busy stands in line.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._left: dict[int, float] = {}  # flow -> bytes
        self._roads: dict[int, Road] = {}
        self._rates: dict[int, float] = {}
        self._lines: dict[Road, deque[tuple[int, float]]] = {}  # one copy engine each way
        self._at = 0.0  # up to when bytes have been counted
        self._first: tuple[float, int] | None = (math.inf, -1)
        self._known: dict[tuple[Road, ...], list[float]] = {}

    def start(self, flow: int, num_bytes: float, road: Road, now: float) -> None:
        """Begin a transfer."""
        if not road.is_host and road in self._roads.values():
            self._lines.setdefault(road, deque()).append((flow, num_bytes))
            return
        self._count(now)
        self._left[flow], self._roads[flow] = num_bytes, road
        self._first = None

    def end(self, flow: int, now: float) -> None:
        """A transfer is over."""
        self._count(now)
        road = self._roads.pop(flow)
        del self._left[flow]
        self._first = None
        if self._lines.get(road):
            following, num_bytes = self._lines[road].popleft()
            self._left[following], self._roads[following] = num_bytes, road

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
                self._left[flow] = max(self._left[flow] - rate * passed, 0.0)
            self._at = now
            self._first = None
