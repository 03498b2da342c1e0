"""What a schedule takes of a device's memory at its worst, visit by visit.

The engine allocates slots by the same `largest_pair`. Activations are counted as they come and go:
what arrives and what leaves has two places each, as ``footprint`` names them; a boundary or
gradient whose next user runs on the same device stays there until then, one a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.plan.memory import PLACES
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit

_Key = tuple[bool, int, int]  # whether it is a gradient, boundary, microbatch


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


@dataclass
class _Routes:
    """Where boundaries and their gradients go, of one step."""

    sends: dict[int, set[int]]  # by visit the boundaries of which something goes to the host
    staying: dict[_Key, int]  # what stays on its device -> the visit that takes it there
    fetches: set[int]  # visits that get a boundary from the host
    fetches_gradient: set[int]


def _routes(visits: Sequence[Visit]) -> _Routes:
    made: dict[_Key, Visit] = {}
    routes = _Routes({}, {}, set(), set())
    for visit in visits:
        start, stop = visit.layers.start, visit.layers.stop
        is_backward = visit.phase is Phase.BACKWARD
        for microbatch in visit.microbatches:
            if start:
                maker = made[False, start, microbatch]
                if maker.device == visit.device and not is_backward:
                    routes.staying[False, start, microbatch] = visit.number
                else:
                    routes.sends.setdefault(maker.number, set()).add(start)
                    routes.fetches.add(visit.number)
            if is_backward:
                if made[True, stop, microbatch].device == visit.device:
                    routes.staying[True, stop, microbatch] = visit.number
                else:
                    routes.fetches_gradient.add(visit.number)
            made.update({(False, boundary, microbatch): visit for boundary in visit.saves})
            if visit.has_backward:
                made[True, start, microbatch] = visit
    return routes


def _activation_bytes(costs: Costs, visits: Sequence[Visit]) -> int:
    """What activations take at the worst moment of any device, of one step."""

    def boundary(layer: int) -> int:
        return costs.layers[layer].boundary_bytes if layer < costs.num_layers else 0

    routes = _routes(visits)
    lowest = costs.num_layers if costs.first_trainable is None else costs.first_trainable
    inner = comes = gradient = leaves = 0
    for visit in visits:
        layers = costs.layers[visit.layers.start : visit.layers.stop]
        reached = costs.layers[max(visit.layers.start, lowest) : visit.layers.stop]
        kept = sum(cost.activation_bytes for cost in reached) if visit.has_backward else 0
        inner = max(inner, kept + max(cost.peak_bytes for cost in layers))
        if visit.number in routes.fetches:
            comes = max(comes, boundary(visit.layers.start))
        if visit.number in routes.fetches_gradient:
            gradient = max(gradient, boundary(visit.layers.stop))
        gives = [visit.layers.start] if visit.gives_gradient and visit.has_backward else []
        leaves = max(leaves, sum(map(boundary, [*routes.sends.get(visit.number, ()), *gives])))
    return inner + PLACES * (comes + gradient + leaves) + _staying(visits, routes, boundary)


def _staying(visits: Sequence[Visit], routes: _Routes, size: Callable[[int], int]) -> int:
    """The most that boundaries and gradients take which stay on a device for its next visit."""
    held: dict[int, int] = {}
    most = 0
    for visit in visits:
        start, stop = visit.layers.start, visit.layers.stop
        for microbatch in visit.microbatches:
            gives = [(False, boundary, microbatch) for boundary in visit.saves]
            if visit.has_backward:
                gives = [(True, start, microbatch)]
            more = sum(size(key[1]) for key in gives if key in routes.staying)
            held[visit.device] = held.get(visit.device, 0) + more
            most = max(most, held[visit.device])
            is_backward = visit.phase is Phase.BACKWARD
            key = (is_backward, stop if is_backward else start, microbatch)
            if routes.staying.get(key) == visit.number:
                held[visit.device] -= size(key[1])
    return most


def _sum(costs: Costs, visit: Visit, name: str) -> int:
    return sum(getattr(costs.layers[layer], name) for layer in visit.layers)
