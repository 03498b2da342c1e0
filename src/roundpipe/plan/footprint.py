"""Which buffers an action touches: the one table behind ``check``, the fake device and the engine.

A buffer is a tuple. Device buffers are used in turn (two slots for weights, two for gradients, two
places for activations each way), so their names end in the turn's parity::

    ("weights", layer)           working weights on the host
    ("master", layer)            master weights and moments
    ("gradient", layer)          gradient on the host
    ("partial", place)           a visit's partial gradients on the host
    ("norm", layer)              norm of a layer's gradient
    ("slot", device, turn)       weights on the device
    ("sums", device, turn)       gradients on the device
    ("in" | "grad_in" | "out", device, turn)   activations and gradients of one microbatch
    ("boundary" | "boundary_gradient" | "loss", step, ...)  on the host, made anew in each step
    ("kept", step, visit, microbatch)  on the host, what a forward visit keeps for recompute
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, OF_LAYERS, Action, Op

if TYPE_CHECKING:
    from collections.abc import Hashable

    from roundpipe.plan.clocks import Node
    from roundpipe.plan.schedule import Schedule, Visit

Buffer = tuple["Hashable", ...]


@dataclass
class Turns:
    """How many visits, visits with gradients and microbatches each device has had so far."""

    visits: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    microbatches: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def copy(self) -> Turns:
        """The same turns, to be counted on from."""
        return Turns(dict(self.visits), dict(self.sums), dict(self.microbatches), self.step)

    def after(self, schedule: Schedule) -> Turns:
        """The turns when ``schedule`` is over."""
        return Footprints(schedule, self).turns_after


@dataclass(frozen=True)
class Footprint:
    """Buffers an action reads and buffers it writes."""

    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()


class Footprints:
    """The footprints of one schedule that begins at given turns."""

    def __init__(self, schedule: Schedule, turns: Turns) -> None:
        self.schedule = schedule
        self.turns = turns
        self.slot: dict[int, int] = {}  # visit -> parity of its weight slot
        self.sums: dict[int, int] = {}
        self._turn: dict[tuple[int, int], int] = {}
        running = turns.copy()
        running.step += 1
        for visit in schedule.visits:
            device = visit.device
            self.slot[visit.number] = _next(running.visits, device, 1)
            self.sums[visit.number] = _next(running.sums, device, int(schedule.trains(visit)))
            for microbatch in visit.microbatches:
                key = (visit.number, microbatch)
                self._turn[key] = _next(running.microbatches, device, 1)
        self.turns_after = running

    def of(self, action: Action) -> Footprint:
        """What ``action`` touches."""
        if action.op in OF_LAYERS:
            return self._host(action)
        visit = self.schedule.visits[action.index]
        if action.op in COMPUTE:
            return self._compute(visit, action)
        if action.op in (Op.UPLOAD, Op.DOWNLOAD, Op.MERGE):
            return self._weights(visit, action)
        return self._activations(visit, action)

    def _host(self, action: Action) -> Footprint:
        layer = action.index
        gradient, master = ("gradient", layer), ("master", layer)
        if action.op is Op.NORM:
            return Footprint((gradient,), (("norm", layer),))
        if action.op is Op.PUBLISH:
            return Footprint((master,), (("weights", layer),))
        norms = tuple(
            ("norm", other.index) for other in self.schedule.streams["host"] if other.op is Op.NORM
        )
        working = () if self.schedule.staleness else (("weights", layer),)
        return Footprint((gradient, *norms), (master, *working))

    def _weights(self, visit: Visit, action: Action) -> Footprint:
        owners, places = self.schedule.owners.get(action, ()), self.schedule.partial_places
        if action.op is Op.UPLOAD:
            slot = ("slot", visit.device, self.slot[visit.number])
            return Footprint(tuple(("weights", owner) for owner in owners), (slot,))
        gradients = tuple(("gradient", owner) for owner in owners)
        if action.op is Op.MERGE:
            added = self.schedule.addends[action]
            return Footprint(tuple(("partial", places[number]) for number in added), gradients)
        partial = (("partial", places[visit.number]),) if visit.number in places else ()
        return Footprint((("sums", visit.device, self.sums[visit.number]),), (*gradients, *partial))

    def _activations(self, visit: Visit, action: Action) -> Footprint:
        assert action.microbatch is not None
        microbatch, device = action.microbatch, visit.device
        key = (visit.number, microbatch)
        turn, step = self._turn[key], self.turns.step
        if action.op is Op.ACTIVATION_IN:
            resident = key in self.schedule.resident or visit.layers.start == 0
            made = () if resident else (("boundary", step, visit.layers.start, microbatch),)
            kept = self.schedule.kept_for.get(key, ())
            made = (*made, *(("kept", step, keeper, microbatch) for keeper in kept))
            return Footprint(made, (("in", device, turn),))
        if action.op is Op.GRADIENT_IN:
            made = (("boundary_gradient", step, visit.layers.stop, microbatch),)
            return Footprint(made, (("grad_in", device, turn),))
        out = (("out", device, turn),)
        if action.op is Op.GRADIENT_OUT:
            return Footprint(out, (("boundary_gradient", step, visit.layers.start, microbatch),))
        if visit.has_backward:
            return Footprint(out, (("loss", step, microbatch),))
        left = [("boundary", step, to, microbatch) for to in self.schedule.sends[key]]
        if visit.number in self.schedule.keeps:
            left.append(("kept", step, *key))
        return Footprint(out, tuple(left))

    def _compute(self, visit: Visit, action: Action) -> Footprint:
        assert action.microbatch is not None
        key = (visit.number, action.microbatch)
        device, turn = visit.device, self._turn[key]
        reads: list[Buffer] = [("slot", device, self.slot[visit.number])]
        writes: list[Buffer] = []
        reads.append(("in", device, turn))  # in backward too: autograd may have saved it
        if action.op is not Op.RECOMPUTE:  # something leaves, or at least takes its turn
            writes.append(("out", device, turn))
        if action.op in (Op.FUSED, Op.BACKWARD) and self.schedule.trains(visit):
            writes.append(("sums", device, self.sums[visit.number]))
        if action.op is Op.BACKWARD and key not in self.schedule.resident_gradient:
            reads.append(("grad_in", device, turn))
        return Footprint(tuple(reads), tuple(writes))


class Accesses:
    """Who touched each buffer last. Feed it accesses in an order that respects waits."""

    def __init__(self) -> None:
        self._writes: dict[Buffer, Node] = {}
        self._reads: dict[Buffer, list[Node]] = {}

    def before(self, node: Node, touched: Footprint) -> dict[Node, Buffer]:
        """What must be over when ``node`` touches these buffers, and for which; counts it in."""
        found: dict[Node, Buffer] = {}
        for buffer in (*touched.reads, *touched.writes):
            if buffer in self._writes:
                found[self._writes[buffer]] = buffer
        for buffer in touched.writes:
            found.update(dict.fromkeys(self._reads.get(buffer, ()), buffer))
        for buffer in touched.reads:
            self._reads.setdefault(buffer, []).append(node)
        for buffer in touched.writes:
            self._writes[buffer], self._reads[buffer] = node, []
        return found


def _next(counts: dict[int, int], device: int, by: int) -> int:
    """The parity of the device's count, which goes on by ``by``."""
    at = counts.get(device, 0)
    counts[device] = at + by
    return at % 2
