"""How much of a device's memory a stage takes, and whether it can fit at all.

Weights and gradients lie in slots. While a stage runs, the next one comes up and the gradients of
the last one leave, so a stage that is followed by one of its own size holds its slot twice.
Activations are of one microbatch: a device runs one at a time. Boundaries have two places each way
(one in use, one on its way), as ``footprint`` names them.

A device holds more than one stage: what fits beside what is `roundpipe.plan.shares`.

[Note: less never takes more] Everything here grows with the layers of a stage, boundaries too: they
count with the largest that a stage touches, not with those at its ends. So every part of a stage
that fits fits as well, and filling stages one by one is as good as trying all cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import NoRoomError
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from roundpipe.plan.costs import Costs

PLACES = 2  # for a boundary, each way


def stage_bytes(costs: Costs, layers: range, phase: Phase) -> int:
    """Bytes on a device that runs ``layers`` in ``phase`` while a stage like it comes or leaves."""
    return 2 * slot_bytes(costs, layers, phase) + microbatch_bytes(costs, layers, phase)


def slot_bytes(costs: Costs, layers: range, phase: Phase) -> int:
    """Bytes of a stage's weights and, where it runs backward, of its fp32 sums of gradients."""
    held = costs.layers[layers.start : layers.stop]
    weights = sum(cost.weight_bytes for cost in held)
    if phase is Phase.FORWARD:
        return weights
    return weights + sum(cost.gradient_bytes for cost in held)


def microbatch_bytes(costs: Costs, layers: range, phase: Phase) -> int:
    """Bytes of the activations of one microbatch at the worst moment of a stage.

    A forward stage keeps only boundaries: those at its ends, and those inside it at which backward
    stages may begin. A stage with backward keeps the activations of all its layers that backward
    reaches, the boundary it starts from, the gradient it gets and the one it gives.
    """
    held = costs.layers[layers.start : layers.stop]
    worst = max(cost.peak_bytes for cost in held)
    boundaries = [cost.boundary_bytes for cost in costs.layers[layers.start : layers.stop + 1]]
    if phase is Phase.FORWARD:
        return PLACES * sum(boundaries) + worst
    lowest = costs.first_trainable
    reached = layers.stop if lowest is None else max(lowest, layers.start)
    kept = sum(cost.activation_bytes for cost in costs.layers[reached : layers.stop])
    return 3 * PLACES * max(boundaries) + kept + worst


@dataclass(frozen=True)
class Room:
    """``limit`` bytes of a device, for a stage and one like it or the fused one at its side.

    ``slot`` and ``microbatch`` are the bytes of the fused stage, where that is set apart.
    """

    costs: Costs
    limit: int
    slot: int = 0
    microbatch: int = 0

    def needs(self, layers: range, phase: Phase) -> int:
        """Bytes for a stage and whichever is larger, one like it or the fused one."""
        slot = slot_bytes(self.costs, layers, phase)
        microbatch = microbatch_bytes(self.costs, layers, phase)
        return max(2 * slot + microbatch, slot + self.slot + max(microbatch, self.microbatch))

    def holds(self, layers: range, phase: Phase) -> bool:
        """Whether a stage and one like it fit. See [Note: less never takes more]."""
        return self.needs(layers, phase) <= self.limit

    def require(self, layers: range, phase: Phase) -> None:
        """Raise NoRoomError, with what is needed and the way out, if a stage does not fit."""
        if self.holds(layers, phase):
            return
        need = self.needs(layers, phase)
        what = (
            f"layer {layers.start} does" if len(layers) == 1 else f"{len(layers)} fused layers do"
        )
        where = "beside the fused layers" if self.slot or self.microbatch else "on the device"
        hints = [] if len(layers) == 1 else ["fuse=1"]
        hints.append(f"device_memory_limit={need} if the device has it")
        activations = max(microbatch_bytes(self.costs, layers, phase), self.microbatch)
        left = self.limit - (need - activations)
        if left > 0:
            hints.append(f"num_microbatch {-(-activations // left)} times as large")
        raise NoRoomError(
            f"{what} not fit {where}: {need} bytes of {self.limit}\nhint: {', or '.join(hints)}"
        )


def room_of(costs: Costs, limit: int, num_fused: int, *, apart: bool = False) -> Room:
    """The room of every stage below so many fused layers.

    The fused stage must fit twice or, ``apart``, beside each of the others. Raises NoRoomError if
    it does not, or if one of the layers below does not fit as a stage of its own.
    """
    below = costs.num_layers - num_fused
    fused = range(below, costs.num_layers)
    room = Room(costs, limit)
    require_layers(room, range(below))
    if not apart or not below:
        room.require(fused, Phase.FUSED)
        return room
    room = Room(
        costs,
        limit,
        slot_bytes(costs, fused, Phase.FUSED),
        microbatch_bytes(costs, fused, Phase.FUSED),
    )
    require_layers(room, range(below))
    return room


def require_layers(room: Room, layers: Iterable[int]) -> None:
    """Raise NoRoomError for the first layer that does not fit as a stage of its own.

    A layer that backward reaches takes most in backward.
    """
    lowest = room.costs.first_trainable
    for layer in layers:
        is_reached = lowest is not None and layer >= lowest
        room.require(range(layer, layer + 1), Phase.BACKWARD if is_reached else Phase.FORWARD)
