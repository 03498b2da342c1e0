"""How fast transfers go that share links and host memory: max-min fair rates.

Every flow has a limit of its own (its link, which is slower while its other direction runs), and
all draw from host memory; links may share one more cap each way. A resource that is asked for more
than it has is shared by weight: a flow limited elsewhere leaves the rest to the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.machine import Machine

HOST = "host"  # the road of what only works on host memory
_UPDATE_WEIGHT = 8.0  # an optimizer on many cores asks for memory as often as so many transfers


class Road(NamedTuple):  # a key of rates that are looked up all the time
    """Where a flow goes: up or down the link of ``device``, or (-1) through host memory alone."""

    device: int
    up: bool = True

    @property
    def is_host(self) -> bool:
        """Whether no link is used."""
        return self.device < 0


ON_HOST = Road(-1)


class Sharing:
    """Rates for a set of flows on ``machine``."""

    def __init__(self, machine: Machine) -> None:
        self._up = [link.up for link in machine.links]
        self._down = [link.down for link in machine.links]
        self._duplex = [link.duplex for link in machine.links]
        self._host = machine.host.bandwidth
        self._alone = min(machine.host.update_bandwidth or self._host, self._host)
        self._cap = machine.link_cap or math.inf

    def rates(self, roads: Sequence[Road]) -> list[float]:
        """Bytes per second of flows on ``roads``, in their order."""
        limits = self._limits(roads)
        if self._cap < math.inf:
            for up in (True, False):
                self._cut(limits, roads, up=up)
        if sum(limits) <= self._host:
            return limits
        weights = [_UPDATE_WEIGHT if road.device < 0 else 1.0 for road in roads]
        return _shared(self._host, limits, weights)

    def _limits(self, roads: Sequence[Road]) -> list[float]:
        """What each flow's link leaves it; flows of one direction share theirs evenly."""
        counts: dict[tuple[int, bool], int] = {}
        for road in roads:
            key = (road.device, road.up)
            counts[key] = counts.get(key, 0) + 1
        out = []
        for road in roads:
            device = road.device
            if device < 0:
                out.append(self._alone)
                continue
            rate = (self._up if road.up else self._down)[device]
            if (device, not road.up) in counts:
                rate *= self._duplex[device]
            out.append(rate / counts[device, road.up])
        return out

    def _cut(self, limits: list[float], roads: Sequence[Road], *, up: bool) -> None:
        """Share the cap of all links of one direction, in place."""
        those = [at for at, road in enumerate(roads) if road.device >= 0 and road.up is up]
        if sum(limits[at] for at in those) > self._cap:
            cut = _shared(self._cap, [limits[at] for at in those], [1.0] * len(those))
            for at, rate in zip(those, cut, strict=True):
                limits[at] = rate


def _shared(capacity: float, limits: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Max-min by weight: fill all at once, whoever reaches its limit first drops out."""
    order = sorted(range(len(limits)), key=lambda at: limits[at] / weights[at])
    rates = [0.0] * len(limits)
    left, weight = capacity, sum(weights)
    for at in order:
        rates[at] = min(limits[at], left * weights[at] / weight)
        left -= rates[at]
        weight -= weights[at]
    return rates
