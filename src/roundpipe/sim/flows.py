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
        # One place a transfer under way, in the order in which they began.
        self._flows: list[int] = []
        self._left: list[float] = []  # bytes
        self._roads: list[Road] = []
        self._rates: list[float] = []
        self._lines: dict[Road, deque[tuple[int, float]]] = {}
        self._at = 0.0  # up to when bytes have been counted
        self._first: tuple[float, int] | None = (math.inf, -1)
        self._known: dict[tuple[Road, ...], list[float]] = {}

    def start(self, flow: int, num_bytes: float, road: Road, now: float) -> None:
        """Begin a transfer."""
        if not road.is_host and road in self._roads:
            self._lines.setdefault(road, deque()).append((flow, num_bytes))
            return
        self._count(now)
        self._add(flow, num_bytes, road)

    def end(self, flow: int, now: float) -> None:
        """A transfer is over."""
        self._count(now)
        place = self._flows.index(flow)
        road = self._roads.pop(place)
        del self._flows[place], self._left[place]
        self._first = None
        if self._lines.get(road):
            self._add(*self._lines[road].popleft(), road)

    def first(self) -> tuple[float, int]:
        """When the next transfer ends at today's rates, and which; (inf, -1) if none is under way.

        Of those that end together the one that began first.
        """
        if self._first is None:
            self._first = self._find()
        return self._first

    def _add(self, flow: int, num_bytes: float, road: Road) -> None:
        self._flows.append(flow)
        self._left.append(num_bytes)
        self._roads.append(road)
        self._first = None

    def _find(self) -> tuple[float, int]:
        roads = tuple(self._roads)
        rates = self._known.get(roads)
        if rates is None:
            rates = self._known[roads] = self._sharing.rates(roads)
        self._rates = rates
        if not rates:
            return math.inf, -1
        needs = [left / rate for left, rate in zip(self._left, rates, strict=True)]
        soonest = min(needs)
        return self._at + soonest, self._flows[needs.index(soonest)]

    def _count(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            for place, rate in enumerate(self._rates):
                left = self._left[place] - rate * passed
                self._left[place] = left if left > 0 else 0.0
            self._at = now
