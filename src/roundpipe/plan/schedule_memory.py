"""What a schedule takes of a device's memory at its worst, visit by visit.

The engine allocates slots by the same `largest_pair`. Activations are counted as they come and go:
what arrives and what leaves has two places each, as ``footprint`` names them; a boundary or
gradient whose next user runs on the same device stays there until then, one a microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.memory import PLACES
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit


def schedule_bytes(costs: Costs, visits: Sequence[Visit], *, devices: int, turn: int = 0) -> int:
    """Bytes that no device of a chain of such steps exceeds; ``turn`` devices further each step."""
    weights = {visit.number: _sum(costs, visit, "weight_bytes") for visit in visits}
    sums = {
        visit.number: _sum(costs, visit, "gradient_bytes")
        for visit in visits
        if visit.has_backward and any(costs.owners_trained(layer) for layer in visit.layers)
    }
    slots = largest_pair(visits, weights, devices=devices, turn=turn)
    slots += largest_pair(visits, sums, devices=devices, turn=turn)
    return slots + _activation_bytes(costs, visits)


def largest_pair(
    visits: Sequence[Visit], sizes: Mapping[int, int], *, devices: int, turn: int
) -> int:
    """Bytes for any two visits of ``sizes`` (by number) that follow each other on one device.

    Steps follow each other and the deal goes on from step to step, so each device sees every
    rotation of the schedule.
    """
    before: dict[int, int] = {}
    most = 0
    for step in range(devices + 1):
        for visit in visits:
            if visit.number in sizes:
                device = (visit.device + step * turn) % devices
                most = max(most, before.get(device, 0) + sizes[visit.number])
                before[device] = sizes[visit.number]
    return most


def _activation_bytes(costs: Costs, visits: Sequence[Visit]) -> int:
    """What activations take at the worst moment of any device, of one step."""

    def boundary(layer: int) -> int:
        return costs.layers[layer].boundary_bytes if layer < costs.num_layers else 0

    lowest = costs.num_layers if costs.first_trainable is None else costs.first_trainable
    inner = comes = gradient = leaves = 0
    for visit in visits:
        layers = costs.layers[visit.layers.start : visit.layers.stop]
        reached = costs.layers[max(visit.layers.start, lowest) : visit.layers.stop]
        kept = sum(cost.activation_bytes for cost in reached) if visit.has_backward else 0
        inner = max(inner, kept + max(cost.peak_bytes for cost in layers))
        comes = max(comes, boundary(visit.layers.start) if visit.layers.start else 0)
        if visit.phase is Phase.BACKWARD:
            gradient = max(gradient, boundary(visit.layers.stop))
        gives = boundary(visit.layers.start) if visit.gives_gradient else 0
        leaves = max(leaves, gives if visit.has_backward else sum(map(boundary, visit.saves)))
    staying = _staying(visits, {layer: boundary(layer) for layer in range(costs.num_layers + 1)})
    return inner + PLACES * (comes + gradient + leaves) + staying


def _staying(visits: Sequence[Visit], size: Mapping[int, int]) -> int:
    """The most that boundaries and gradients take which stay on a device for its next visit."""
    made: dict[tuple[bool, int, int], int] = {}  # is it a gradient, boundary, microbatch -> where
    used: dict[tuple[bool, int, int], int] = {}
    for visit in visits:
        for microbatch in visit.microbatches:
            key = (visit.phase is Phase.BACKWARD, *_taken(visit, microbatch))
            if made.get(key) == visit.device:
                used[key] = visit.number
            for boundary in visit.saves:
                made[False, boundary, microbatch] = visit.device
            if visit.gives_gradient and visit.has_backward:
                made[True, visit.layers.start, microbatch] = visit.device
    held: dict[int, int] = {}
    most = 0
    for visit in visits:
        for microbatch in visit.microbatches:
            gives = [(False, boundary, microbatch) for boundary in visit.saves]
            if visit.has_backward:
                gives = [(True, visit.layers.start, microbatch)]
            more = sum(size[key[1]] for key in gives if key in used)
            held[visit.device] = held.get(visit.device, 0) + more
            most = max(most, held[visit.device])
            key = (visit.phase is Phase.BACKWARD, *_taken(visit, microbatch))
            if used.get(key) == visit.number:
                held[visit.device] -= size[key[1]]
    return most


def _taken(visit: Visit, microbatch: int) -> tuple[int, int]:
    """What a visit takes that may have stayed: a boundary or, in backward, its gradient."""
    if visit.phase is Phase.BACKWARD:
        return visit.layers.stop, microbatch
    return visit.layers.start, microbatch


def _sum(costs: Costs, visit: Visit, name: str) -> int:
    return sum(getattr(costs.layers[layer], name) for layer in visit.layers)
