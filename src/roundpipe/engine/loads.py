"""What each action of a program takes on an emulated machine, by the layers' declared costs.

Bytes follow what the engine really moves: the same chunks, the same choice of what stays on a
device, of what comes down whole and of what is added up on the host. Memory follows what it really
holds: a boundary from its arrival to its last use there, what recompute leaves from there to the
end of backward, what leaves from its making to the end of its transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.device.emulated_links import Load, Way
from roundpipe.engine.cuts import chunk_range
from roundpipe.plan.actions import OF_LAYERS, Action, Op
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from roundpipe.engine.program import Program
    from roundpipe.plan.costs import Costs, LayerCost
    from roundpipe.plan.schedule import Visit


class Loads:
    """The loads of one program's actions. ``speeds``: of each device, relative to the costs'."""

    def __init__(self, program: Program, costs: Costs, speeds: tuple[float, ...] = ()) -> None:
        self._program, self._schedule = program, program.schedule
        self._costs, self._speeds = costs, speeds
        self._known: dict[tuple[Action, bool], Load] = {}
        self._summed = self._partial()

    def of(self, action: Action, *, by_layer: bool = False) -> Load:
        """What ``action`` takes; ``by_layer``: recompute keeps one layer's activations."""
        load = self._known.get((action, by_layer))
        if load is None:
            load = self._known[action, by_layer] = self._made(action, by_layer=by_layer)
        return load

    def _made(self, action: Action, *, by_layer: bool) -> Load:
        if action.op in OF_LAYERS:
            return self._host(action)
        visit = self._schedule.visits[action.index]
        if action.microbatch is None:
            return self._weights(visit, action)
        if action.op in (Op.ACTIVATION_IN, Op.GRADIENT_IN):
            return self._incoming(visit, action.op, action.microbatch)
        if action.op in (Op.ACTIVATION_OUT, Op.GRADIENT_OUT):
            return self._leaving(visit, action.op, action.microbatch)
        return self._compute(visit, action, by_layer=by_layer)

    # ---- host and weights

    def _host(self, action: Action) -> Load:
        cost = self._costs.layers[action.index]
        summed = any(layer == action.index for _, layer in self._summed)
        norm = cost.gradient_bytes if summed else cost.whole_download_bytes
        if action.op is Op.NORM:
            return Load(num_bytes=norm)  # it reads them
        if action.op is Op.PUBLISH:
            return Load(num_bytes=cost.publish_bytes)
        # Apart from publishing, an update does not write working weights: a third of its traffic.
        apart = cost.publish_bytes // 3 if self._schedule.staleness else 0
        beside = norm if self._schedule.is_eager else 0  # its gradient's norm is taken there
        return Load(num_bytes=max(cost.update_bytes - apart, 0) + beside)

    def _weights(self, visit: Visit, action: Action) -> Load:
        if action.op is Op.MERGE:
            return Load(num_bytes=self._merge(action))
        if action.op is Op.DOWNLOAD:
            return Load(num_bytes=self._chunk(action, self._download(visit)), way=Way.DOWN)
        size = sum(cost.weight_bytes for cost in self._layers(visit))
        return Load(num_bytes=self._chunk(action, size), way=Way.UP)

    def _chunk(self, action: Action, size: int) -> int:
        assert action.chunk is not None
        low, high = chunk_range(size, action.chunk, self._schedule.chunks[action.op, action.index])
        return high - low

    def _download(self, visit: Visit) -> int:
        return sum(
            self._costs.layers[layer].gradient_bytes
            if (visit.number, layer) in self._summed
            else self._costs.layers[layer].whole_download_bytes
            for layer in visit.layers
        )

    def _merge(self, action: Action) -> int:
        """What visits brought is read, each owner's sum written, and read if it was begun."""
        whole = set(self._schedule.owners[action])
        begun = self._schedule.begun_sums(action)
        read = [
            layer
            for number in self._schedule.addends[action]
            for layer in self._schedule.visits[number].layers
            if (number, layer) in self._summed and whole & set(self._costs.owners_trained(layer))
        ]
        return sum(self._costs.layers[layer].gradient_bytes for layer in (*read, *whole, *begun))

    def _partial(self) -> set[tuple[int, int]]:
        """The (visit, layer) whose gradients come down to be added up."""
        found: set[tuple[int, int]] = set()
        for visit in self._schedule.visits:
            if self._schedule.trains(visit):
                direct = self._schedule.owners[Action(Op.DOWNLOAD, visit.number, chunk=0)]
                found.update(
                    (visit.number, layer)
                    for layer in visit.layers
                    if layer not in direct and self._costs.layers[layer].is_trainable
                )
        return found

    # ---- activations

    def _incoming(self, visit: Visit, op: Op, microbatch: int) -> Load:
        if op is Op.GRADIENT_IN:
            size = self._boundary(visit.layers.stop)
        else:
            comes = self._program.takes_boundary(visit, microbatch)
            size = self._boundary(visit.layers.start) if comes else 0
        return Load(num_bytes=size, way=Way.UP, takes=size)

    def _leaving(self, visit: Visit, op: Op, microbatch: int) -> Load:
        if op is Op.GRADIENT_OUT:
            size = self._boundary(visit.layers.start)
            return Load(num_bytes=size, way=Way.DOWN, gives=size)
        if visit.phase is Phase.FUSED:
            return Load()  # a loss
        key = (visit.number, microbatch)
        sends = self._schedule.sends.get(key, ())
        stays = visit.layers.stop if key in self._program.kept else None
        return Load(
            num_bytes=sum(map(self._boundary, sends)),
            way=Way.DOWN,
            gives=sum(self._boundary(boundary) for boundary in sends if boundary != stays),
        )

    def _compute(self, visit: Visit, action: Action, *, by_layer: bool) -> Load:
        op, layers = action.op, self._layers(visit)
        seconds = 0.0
        if op is not Op.BACKWARD:
            seconds += sum(cost.forward_seconds for cost in layers)
        if op in (Op.BACKWARD, Op.FUSED):
            seconds += sum(cost.backward_seconds for cost in layers)
        by_layer = by_layer and visit.phase is Phase.BACKWARD
        if by_layer:  # all but the last layer without gradient, and once more with it
            last = layers[-1].forward_seconds
            seconds += -last if op is Op.RECOMPUTE else sum(c.forward_seconds for c in layers)
        assert action.microbatch is not None
        takes, needs, gives = self._held(visit, op, action.microbatch, by_layer=by_layer)
        speed = self._speeds[visit.device] if self._speeds else 1.0
        return Load(max(seconds, 0.0) / speed, takes=takes, needs=needs, gives=gives)

    def _held(
        self, visit: Visit, op: Op, microbatch: int, *, by_layer: bool
    ) -> tuple[int, int, int]:
        """What a compute action takes, needs while it runs, and gives back."""
        layers = self._layers(visit)
        start, stop = visit.layers.start, visit.layers.stop
        came = self._boundary(start) if start else 0
        needs = max(cost.peak_bytes for cost in layers)
        if op is Op.FORWARD:
            made = set(self._schedule.sends.get((visit.number, microbatch), ()))
            if (visit.number, microbatch) in self._program.kept:
                made.add(stop)
            return sum(map(self._boundary, made)), needs, came
        lowest = self._costs.first_trainable
        reached = layers[max((stop if lowest is None else lowest) - start, 0) :]
        kept = sum(cost.activation_bytes for cost in reached)
        if by_layer:
            kept = sum(cost.boundary_bytes for cost in layers[1:])
            if op is Op.BACKWARD:
                needs = max(cost.activation_bytes + cost.peak_bytes for cost in layers)
        gradient = came if visit.gives_gradient else 0
        if op is Op.FUSED:
            return kept + gradient, needs, kept + came
        if op is Op.RECOMPUTE:
            return kept, needs, 0
        return gradient, needs, kept + came + self._boundary(stop)

    def _layers(self, visit: Visit) -> tuple[LayerCost, ...]:
        return self._costs.layers[visit.layers.start : visit.layers.stop]

    def _boundary(self, boundary: int) -> int:
        layers = self._costs.layers
        return layers[boundary].boundary_bytes if boundary < len(layers) else 0
