"""Which devices run a stage, and how they share its microbatches.

Cyclic: the next devices in turn, shares as even as can be. Earliest: those that will be free first,
by the costs, shares as even as their speeds. Levelled: likewise, and what all devices share is cut
so that they are done together; good where many stages are shared, bad where a pipeline begins.

A device twice as fast so gets twice the work, as long as stages are shared (`Replicas`). A stage
that one device runs alone holds up all that follow it; then stages themselves have to be cut
unevenly and dealt in turn (``partition_for_speeds``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.costs import Costs

Share = tuple[int, tuple[int, ...]]  # a device, its microbatches
_SAME = 1e-9  # times nearer than this, relative to a microbatch, are equal


def shares(items: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut ``items`` into at most ``count`` even runs (the first ones longer), none empty."""
    count = min(count, len(items))
    sizes = [len(items) // count + (share < len(items) % count) for share in range(count)]
    return runs(items, sizes)


def runs(items: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut ``items`` into consecutive runs of ``sizes``."""
    out, at = [], 0
    for size in sizes:
        out.append(tuple(items[at : at + size]))
        at += size
    return out


@dataclass
class InTurn:
    """Deals to the devices in turn."""

    devices: int
    next_device: int = 0

    def deal(self, stage: Stage, group: Sequence[int], copies: int) -> list[Share]:
        """Shares of one stage in the order of visits."""
        del stage
        dealt = []
        for share in shares(group, min(copies, self.devices)):
            dealt.append((self.next_device, share))
            self.next_device = (self.next_device + 1) % self.devices
        return dealt


@dataclass(frozen=True)
class Stage:
    """What a dealer has to know of a stage: ``saves`` as in a visit."""

    phase: Phase
    layers: range
    saves: tuple[int, ...]


@dataclass
class ToEarliest:
    """Deals to the devices that will be free first; plays what it has dealt to know which.

    Transfers take no time here. ``speeds`` are relative: work of t seconds takes t / speed.
    ``is_levelled``: a stage that all devices share is cut so that all are done together.
    """

    costs: Costs
    speeds: Sequence[float]
    start_device: int = 0
    is_levelled: bool = False
    free: list[float] = field(init=False)
    _made: dict[tuple[int, int], float] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) <= 0:
            raise PlanError(f"speeds must be above 0, one a device: {tuple(self.speeds)}")
        self.free = [0.0] * len(self.speeds)

    def deal(self, stage: Stage, group: Sequence[int], copies: int) -> list[Share]:
        """Shares of one stage in the order of visits."""
        layers = [self.costs.layers[layer] for layer in stage.layers]
        forward = sum(layer.forward_seconds for layer in layers)
        backward = 0.0
        if stage.phase is not Phase.FORWARD:
            backward = sum(layer.backward_seconds for layer in layers)
        seconds = forward + backward
        copies = min(copies, len(group), len(self.speeds))
        devices = self._choose(len(group), copies, seconds)
        begin = [0.0] * copies
        if self.is_levelled and copies == len(self.speeds):
            begin = [self.free[device] for device in devices]
        counts = self._counts(devices, begin, len(group), seconds)
        dealt = []
        for device, share in zip(devices, runs(group, counts), strict=True):
            if share:
                self._play(stage, device, share, (forward, backward))
                dealt.append((device, share))
        return dealt

    def _choose(self, total: int, copies: int, seconds: float) -> list[int]:
        """The devices that would be done first with an even share, in the order of that.

        Of equals the next in turn from the start device.
        """
        are_alike = min(self.speeds) == max(self.speeds)
        work = 0.0 if are_alike else seconds * -(-total // copies)
        count = len(self.speeds)

        def when(device: int) -> tuple[int, int]:
            done = self.free[device] + work / self.speeds[device]
            grains = round(done / (seconds * _SAME)) if seconds else 0
            return grains, (device - self.start_device) % count

        return sorted(range(count), key=when)[:copies]

    def _counts(
        self, devices: Sequence[int], begin: Sequence[float], total: int, seconds: float
    ) -> list[int]:
        """How many microbatches each takes so that all are done about together."""
        seconds = seconds or 1.0
        counts, ends = [0] * len(devices), list(begin)
        each = [seconds / self.speeds[device] for device in devices]
        for _ in range(total):
            _, _, at = min((ends[at] + each[at], counts[at], at) for at in range(len(devices)))
            ends[at] += each[at]
            counts[at] += 1
        return counts

    def _play(
        self, stage: Stage, device: int, share: Sequence[int], seconds: tuple[float, float]
    ) -> None:
        """Run a visit and remember when it hands out what."""
        forward, backward = (each / self.speeds[device] for each in seconds)
        start, stop = stage.layers.start, stage.layers.stop
        now = self.free[device]
        for microbatch in share:
            now = max(now, self._made.get((start, microbatch), 0.0)) + forward
            if stage.phase is Phase.BACKWARD:
                now = max(now, self._gradients[stop, microbatch])
            if stage.phase is not Phase.FORWARD:
                now += backward
                self._gradients[start, microbatch] = now
            for boundary in stage.saves:
                self._made[boundary, microbatch] = now
        self.free[device] = now
