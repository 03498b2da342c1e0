"""What work asks of an emulated machine, and how fast the machine moves bytes that share its roads.

A direction of a link has one copy engine: copies go one after the other, in the order in which
they became ready, whatever streams they are on. So at most one *flow* is on each direction; what
flows share are the link (slower while its other way runs), the cap of all links each way, and host
memory, which optimizer and sums of gradients use too. Rates are max-min fair: all grow together,
and whoever reaches a limit of its own leaves the rest to the others.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.machine import Machine

_HOST_WEIGHT = 8.0  # an optimizer on many cores asks for memory as often as so many copies
_KEPT_RATES = 10_000  # sets of flows whose rates are remembered


class Way(enum.Enum):
    """Where bytes go."""

    UP = "host to device"
    DOWN = "device to host"
    HOST = "through host memory alone"


@dataclass(frozen=True, slots=True)
class Load:
    """What one work takes on an emulated machine: ``seconds`` of its stream, then bytes moved.

    On its device it ``takes`` memory when it starts, that and ``needs`` more while it runs, and
    ``gives`` back when it ends: what it made may outlive it, what it used up may be older.
    """

    seconds: float = 0.0
    num_bytes: float = 0.0
    way: Way = Way.HOST
    takes: int = 0
    needs: int = 0
    gives: int = 0


Road = tuple[int, Way]  # the number of a device, and a way over its link


class Flow:
    """Bytes under way. ``end`` is when they will have arrived if nothing changes."""

    __slots__ = ("end", "left", "rate", "road", "since", "then")

    def __init__(self, road: Road, num_bytes: float, then: Callable[[], None]) -> None:
        self.road = road
        self.left = num_bytes
        self.then = then
        self.rate = 0.0
        self.since = 0.0
        self.end = math.inf

    def change(self, rate: float, now: float) -> None:
        """Go on at ``rate``. A flow whose rate stays is left alone, so its end stays exact."""
        if rate != self.rate:
            self.left = max(self.left - self.rate * (now - self.since), 0.0)
            self.rate, self.since = rate, now
            self.end = now + self.left / rate


class Links:
    """The flows of one machine. Used by one thread."""

    def __init__(self, machine: Machine) -> None:
        self._rates = Rates(machine)
        self._flows: list[Flow] = []
        self._is_stale = False

    def add(self, flow: Flow) -> None:
        """Begin to move ``flow`` now."""
        self._flows.append(flow)
        self._is_stale = True

    def next_end(self, now: float) -> float:
        """When the first of the flows ends; infinite without any."""
        if self._is_stale:
            self._flows.sort(key=_by_road)
            rates = self._rates.of(tuple(flow.road for flow in self._flows))
            for flow, rate in zip(self._flows, rates, strict=True):
                flow.change(rate, now)
            self._is_stale = False
        return min((flow.end for flow in self._flows), default=math.inf)

    def take_ended(self, now: float) -> list[Flow]:
        """Take out the flows that have ended."""
        ended = [flow for flow in self._flows if flow.end <= now]
        if ended:
            self._flows = [flow for flow in self._flows if flow.end > now]
            self._is_stale = True
        return ended


def _by_road(flow: Flow) -> tuple[int, str]:
    return flow.road[0], flow.road[1].name


class Rates:
    """Bytes per second of flows that share ``machine``; see the module docstring."""

    def __init__(self, machine: Machine) -> None:
        self._links = machine.links
        self._cap = math.inf if machine.link_cap is None else machine.link_cap
        self._host = machine.host.bandwidth
        self._update = min(machine.host.update_bandwidth or self._host, self._host)
        self._known: dict[tuple[Road, ...], list[float]] = {}

    def of(self, roads: tuple[Road, ...]) -> list[float]:
        """The rate of each of ``roads``; a direction of a link is on it once at most."""
        rates = self._known.get(roads)
        if rates is None:
            if len(self._known) >= _KEPT_RATES:
                self._known.clear()
            rates = self._known[roads] = self._shared(roads)
        return rates

    def _shared(self, roads: tuple[Road, ...]) -> list[float]:
        limits = [self._alone(road, roads) for road in roads]
        for way in (Way.UP, Way.DOWN):
            those = [at for at, road in enumerate(roads) if road[1] is way]
            cut = fair_shares(self._cap, [limits[at] for at in those], [1.0] * len(those))
            for at, limit in zip(those, cut, strict=True):
                limits[at] = limit
        weights = [_HOST_WEIGHT if way is Way.HOST else 1.0 for _, way in roads]
        return fair_shares(self._host, limits, weights)

    def _alone(self, road: Road, roads: tuple[Road, ...]) -> float:
        """What the link would give if nothing else were shared."""
        device, way = road
        if way is Way.HOST:
            return self._update
        link = self._links[device]
        other = Way.DOWN if way is Way.UP else Way.UP
        rate = link.up if way is Way.UP else link.down
        return rate * link.duplex if (device, other) in roads else rate


def fair_shares(capacity: float, limits: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Share ``capacity`` by weight among those who can take no more than their limits."""
    if sum(limits) <= capacity:
        return list(limits)
    shares = [0.0] * len(limits)
    left, weight = capacity, sum(weights)
    for at in sorted(range(len(limits)), key=lambda at: limits[at] / weights[at]):
        shares[at] = min(limits[at], left * weights[at] / weight)
        left -= shares[at]
        weight -= weights[at]
    return shares
