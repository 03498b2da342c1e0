"""Stages that are uneven on purpose: for devices of unequal speed or memory, and for the ramp.

Dealt in turn, stage k of a step runs on device k mod N. A stage must take every device about the
same time, or all that follow wait for the slowest; so a device twice as fast gets stages twice as
long. Each is filled as far as its own device allows.

At the ends of a step devices wait for their first work or have had their last. Shorter stages there
begin and end sooner: a taper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.memory import Room
from roundpipe.plan.partition import Partition
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roundpipe.plan.costs import Costs

_LIMITS = 80  # limits tried between the longest layer and all work of a stage
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class UnevenDevices:
    """Relative speeds, one a device in the order of the deal, and what each has of memory."""

    costs: Costs
    speeds: Sequence[float]
    memory_limits: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) <= 0:
            raise PlanError(f"speeds must be above 0, one a device: {tuple(self.speeds)}")
        if self.memory_limits is not None and len(self.memory_limits) != len(self.speeds):
            raise PlanError(
                f"memory limits must be one a device, of {len(self.speeds)}: "
                f"{tuple(self.memory_limits)}"
            )

    def speed(self, stage: int) -> float:
        """Of the device that a stage is dealt to."""
        return self.speeds[stage % len(self.speeds)]

    def room(self, stage: int) -> Room | None:
        """Of the device that a stage is dealt to; None: it holds anything."""
        if self.memory_limits is None:
            return None
        return Room(self.costs, self.memory_limits[stage % len(self.speeds)])

    def seconds(self, layers: range, phase: Phase) -> float:
        """Of one microbatch through a stage at speed 1."""
        held = self.costs.layers[layers.start : layers.stop]
        forward = sum(layer.forward_seconds for layer in held)
        if phase is Phase.FORWARD:
            return forward
        return forward + sum(layer.backward_seconds for layer in held)

    def fits(self, stage: int, layers: range, phase: Phase, limit: float) -> bool:
        """Whether the stage's device holds the layers and runs them within ``limit`` seconds."""
        if self.seconds(layers, phase) > limit * self.speed(stage) * _ROUNDING:
            return False
        room = self.room(stage)
        return room is None or room.holds(layers, phase)


def partition_for_speeds(devices: UnevenDevices, limit: float, *, fuse: int = 1) -> Partition:
    """Stages each filled as far as ``limit`` seconds on its own device, dealt in turn, and memory.

    A layer that alone takes longer becomes a stage of its own; ``fuse`` layers at least are fused.
    Raises PlanError if a layer does not fit on the device it comes to.
    """
    num_layers = devices.costs.num_layers
    lowest = devices.costs.first_trainable
    least = max(num_layers - max(fuse, 1), 0)
    for start in range(least + 1):
        fused = range(start, num_layers)
        if start < least and devices.seconds(fused, Phase.FUSED) > limit * max(devices.speeds):
            continue
        forward = _filled(devices, limit, range(start), Phase.FORWARD, 0)
        if start == least or devices.fits(len(forward), fused, Phase.FUSED, limit):
            break
    room = devices.room(len(forward))
    if room is not None:
        room.require(fused, Phase.FUSED)
    below = range(start - 1, lowest - 1, -1) if lowest is not None else range(0)
    backward = _filled(devices, limit, below, Phase.BACKWARD, len(forward) + 1)
    return Partition(tuple(forward), fused, tuple(backward))


def uneven_front(devices: UnevenDevices, *, fuse: int = 1) -> list[Partition]:
    """For each number of stages that some limit gives, a partition for devices of unequal speed.

    The one whose longest stage, on its device, is shortest among limits that grow evenly in ratio.
    From few stages to many. Raises PlanError if a layer does not fit on the device it comes to.
    """
    whole = range(devices.costs.num_layers)
    most = devices.seconds(whole, Phase.FUSED) / min(devices.speeds)
    single = (range(layer, layer + 1) for layer in whole)
    least = max(devices.seconds(layers, Phase.FORWARD) for layers in single) / max(devices.speeds)
    if not 0 < least < most:
        return [partition_for_speeds(devices, most, fuse=fuse)]
    best: dict[int, tuple[float, Partition]] = {}
    for step in range(_LIMITS):
        limit = least * (most / least) ** (step / (_LIMITS - 1))
        found = partition_for_speeds(devices, limit, fuse=fuse)
        longest = max(seconds_by_stage(devices, found))
        count = found.num_stages
        if count not in best or longest < best[count][0]:
            best[count] = longest, found
    return [best[count][1] for count in sorted(best)]


def seconds_by_stage(devices: UnevenDevices, partition: Partition) -> list[float]:
    """What one microbatch takes each stage of a round on the device it is dealt to, in order."""
    stages = [
        *((layers, Phase.FORWARD) for layers in partition.forward),
        (partition.fused, Phase.FUSED),
        *((layers, Phase.BACKWARD) for layers in partition.backward),
    ]
    return [
        devices.seconds(layers, phase) / devices.speed(stage)
        for stage, (layers, phase) in enumerate(stages)
    ]


def tapered(partition: Partition, costs: Costs, *, stages: int, pieces: int) -> Partition:
    """Cut the first ``stages`` forward stages and the last backward ones into ``pieces`` each.

    As even in time as layers allow, and no more pieces than a stage has layers; whatever memory
    holds a stage holds its pieces.
    """

    def forward(layers: range) -> float:
        return sum(costs.layers[layer].forward_seconds for layer in layers)

    def both(layers: range) -> float:
        return forward(layers) + sum(costs.layers[layer].backward_seconds for layer in layers)

    first, rest = partition.forward[:stages], partition.forward[stages:]
    keep = max(len(partition.backward) - stages, 0)
    above, last = partition.backward[:keep], partition.backward[keep:]
    return Partition(
        (*(part for stage in first for part in _pieces(stage, pieces, forward)), *rest),
        partition.fused,
        (*above, *(part for stage in last for part in reversed(_pieces(stage, pieces, both)))),
    )


def split_forward(partition: Partition, costs: Costs, *, pieces: int) -> Partition:
    """Cut every forward stage into ``pieces``, as even in time as layers allow.

    Work that follows an update starts when its own weights are there: the smaller the sooner.
    """

    def forward(layers: range) -> float:
        return sum(costs.layers[layer].forward_seconds for layer in layers)

    parts = (part for stage in partition.forward for part in _pieces(stage, pieces, forward))
    return Partition(tuple(parts), partition.fused, partition.backward)


def _pieces(stage: range, count: int, seconds: Callable[[range], float]) -> list[range]:
    """At most ``count`` parts of a stage, bottom up, each about its share of what is left."""
    count = min(count, len(stage))
    parts, start = [], stage.start
    for left in range(count, 0, -1):
        share = seconds(range(start, stage.stop)) / left
        ends = range(start + 1, stage.stop - left + 2)
        end = min(ends, key=lambda end: abs(seconds(range(start, end)) - share))
        parts.append(range(start, end))
        start = end
    return parts


def _filled(
    devices: UnevenDevices, limit: float, layers: range, phase: Phase, stage: int
) -> list[range]:
    """Stages over ``layers`` in their order, up or down, the first of which is number ``stage``."""
    return list(_fill(devices, limit, layers, phase, stage))


def _fill(
    devices: UnevenDevices, limit: float, layers: range, phase: Phase, stage: int
) -> Iterator[range]:
    held: list[int] = []
    for layer in layers:
        wider = _interval([*held, layer])
        if held and not devices.fits(stage, wider, phase, limit):
            yield _interval(held)
            stage, held = stage + 1, []
        if not held and (room := devices.room(stage)) is not None:
            room.require(range(layer, layer + 1), phase)
        held.append(layer)
    if held:
        yield _interval(held)


def _interval(layers: Sequence[int]) -> range:
    return range(min(layers), max(layers) + 1)
