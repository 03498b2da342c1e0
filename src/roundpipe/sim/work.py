"""What each action asks of a machine: time on its stream, bytes over a road, Python's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, OF_LAYERS, Action, Op
from roundpipe.plan.schedule import Phase
from roundpipe.sim.sharing import ON_HOST, Road

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Schedule, Visit


@dataclass(frozen=True, slots=True)
class Work:
    """``seconds`` on the stream, then ``num_bytes`` over ``road``.

    ``host_seconds`` of Python come first and may run while the action before is still under way.
    """

    seconds: float = 0.0
    num_bytes: float = 0.0
    road: Road = ON_HOST
    host_seconds: float = 0.0


NOTHING = Work()


@dataclass(frozen=True, kw_only=True)
class Prices:
    """From costs to work. ``speeds``: of each device, relative to the one of the costs.

    ``action_seconds`` is added to every compute action. ``norm_traffic``: accesses to host memory
    per byte of a gradient for its norm. Partial gradients are each read once when they are added
    up; the sum is written, and read, once for each round.
    """

    costs: Costs
    speeds: tuple[float, ...] = ()
    action_seconds: float = 0.0
    norm_traffic: float = 1.0

    def work(self, schedule: Schedule) -> Callable[[Action], Work]:
        """The work of every action of ``schedule``."""
        return _Works(self, schedule).of


class _Works:
    def __init__(self, prices: Prices, schedule: Schedule) -> None:
        self._prices, self._schedule = prices, schedule
        self._layers = prices.costs.layers
        self._kept: dict[tuple[Op, int], Work] = {}
        self._merged = _merged(schedule)
        self._sends = schedule.sends

    def of(self, action: Action) -> Work:
        """What ``action`` asks."""
        if action.op in (Op.ACTIVATION_OUT, Op.ACTIVATION_IN):
            return self._activation(action)
        key = (action.op, action.index)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._make(action)
        return found

    def _make(self, action: Action) -> Work:
        if action.op in OF_LAYERS:
            return self._host(action)
        visit = self._schedule.visits[action.index]
        if action.op in COMPUTE:
            return self._compute(action.op, visit)
        if action.op is Op.MERGE:
            return Work(num_bytes=self._merge_bytes(action))
        if action.op is Op.GRADIENT_IN:
            return Work(num_bytes=self._boundary_bytes(visit.layers.stop), road=Road(visit.device))
        if action.op is Op.GRADIENT_OUT:
            size = self._boundary_bytes(visit.layers.start)
            return Work(num_bytes=size, road=Road(visit.device, up=False))
        return self._weights(action, visit)

    def _weights(self, action: Action, visit: Visit) -> Work:
        """A chunk of a visit's weights up, or of its gradients down."""
        chunks = self._schedule.chunks.get((action.op, visit.number), 1)
        if action.op is Op.UPLOAD:
            total = sum(self._layers[layer].weight_bytes for layer in visit.layers)
            return Work(num_bytes=total / chunks, road=Road(visit.device))
        total = sum(self._download_bytes(layer) for layer in visit.layers)
        return Work(num_bytes=total / chunks, road=Road(visit.device, up=False))

    def _compute(self, op: Op, visit: Visit) -> Work:
        costs = [self._layers[layer] for layer in visit.layers]
        speed = self._prices.speeds[visit.device] if self._prices.speeds else 1.0
        seconds = host = 0.0
        if op is not Op.BACKWARD:
            seconds += sum(cost.forward_seconds for cost in costs)
            host += sum(cost.host_forward_seconds for cost in costs)
        if op in (Op.BACKWARD, Op.FUSED):
            seconds += sum(cost.backward_seconds for cost in costs)
            host += sum(cost.host_backward_seconds for cost in costs)
        return Work(seconds / speed + self._prices.action_seconds, host_seconds=host)

    def _host(self, action: Action) -> Work:
        cost = self._layers[action.index]
        whole = action.index in self._merged
        size = cost.gradient_bytes if whole else cost.whole_download_bytes
        norm = self._prices.norm_traffic * size
        if action.op is Op.NORM:
            return Work(num_bytes=norm)
        if action.op is Op.PUBLISH:
            return Work(num_bytes=cost.publish_bytes)
        # Apart, the update does not write what publishing writes: a third of its traffic.
        written = cost.publish_bytes // 3 if self._schedule.staleness else 0
        beside = norm if self._schedule.is_eager else 0.0  # its gradient's norm is taken there
        return Work(num_bytes=max(cost.update_bytes - written, 0) + beside)

    def _download_bytes(self, layer: int) -> int:
        cost = self._layers[layer]
        merged = self._prices.costs.owners_trained(layer)
        if any(owner in self._merged for owner in merged):
            return cost.gradient_bytes
        return cost.whole_download_bytes

    def _merge_bytes(self, action: Action) -> float:
        """What visits brought is read, each owner's sum written, and read if it was begun."""
        schedule, costs = self._schedule, self._prices.costs
        whole, begun = set(schedule.owners[action]), schedule.begun_sums(action)
        total = sum(self._layers[owner].gradient_bytes for owner in (*whole, *begun))
        for number in schedule.addends[action]:
            for layer in schedule.visits[number].layers:
                if whole & set(costs.owners_trained(layer)):
                    total += self._layers[layer].gradient_bytes
        return total

    def _boundary_bytes(self, boundary: int) -> int:
        layers = self._layers
        return layers[boundary].boundary_bytes if boundary < len(layers) else 0

    def _activation(self, action: Action) -> Work:
        assert action.microbatch is not None
        visit = self._schedule.visits[action.index]
        key = (visit.number, action.microbatch)
        if action.op is Op.ACTIVATION_IN:
            stays = visit.layers.start == 0 or key in self._schedule.resident
            size = 0 if stays else self._boundary_bytes(visit.layers.start)
            return Work(num_bytes=size, road=Road(visit.device))
        sends: Sequence[int] = () if visit.phase is Phase.FUSED else self._sends.get(key, ())
        size = sum(self._boundary_bytes(boundary) for boundary in sends)
        return Work(num_bytes=size, road=Road(visit.device, up=False))


def _merged(schedule: Schedule) -> set[int]:
    """Owners whose gradient comes in parts."""
    merges = [owners for action, owners in schedule.owners.items() if action.op is Op.MERGE]
    return {owner for owners in merges for owner in owners}
