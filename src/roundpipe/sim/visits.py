"""Play a chain of steps visit by visit: what the search does some dozens of times.

The same machine and the same rules as ``simulate_machine`` has for an outlined schedule, in a small
part of the time. A visit runs its microbatches one behind the other, so once its weights are there
and the visits that feed it are known, all its times follow at once::

    end(j) = max(end(j-1) + R, arrival(j) + R, gradient(j)) + B

Only weights, gradients and updates are events. Python's time is not played: as long as there is
less of it than of compute it hides, and a step is never shorter than all of it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError
from roundpipe.plan.schedule import Phase
from roundpipe.sim.flows import Flows
from roundpipe.sim.sharing import ON_HOST, Road, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine
    from roundpipe.plan.schedule import Visit
    from roundpipe.sim.work import Prices


@dataclass(slots=True)
class _Node:
    """Something with one end: a visit's compute (``visit``), a transfer, or an update."""

    missing: int = 0
    users: list[int] = field(default_factory=list)
    num_bytes: float = 0.0
    road: Road = ON_HOST
    visit: int = -1  # of a compute node: which visit of the chain
    followers: list[int] = field(default_factory=list)  # compute nodes that only have to know it


@dataclass(slots=True)
class _Run:
    """One visit in one step: what it takes and what it gives, filled in as it is known."""

    step: int
    device: int
    share: tuple[int, ...]
    recompute: float
    rest: float
    boundary: int  # read, 0 if none
    gradient: int  # read, -1 if none
    saves: tuple[int, ...]
    gives: int  # the boundary whose gradient it gives, -1 if none


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A chain of equal steps; each is dealt ``turn`` devices further than the one before."""

    visits: Sequence[Visit]
    devices: int
    num_steps: int
    turn: int = 0
    staleness: int = 0
    eager: bool = False


class VisitPlayer:
    """Plays a chain of steps. ``step_ends``: for each when its last compute ends, once played."""

    def __init__(
        self, steps: Steps, prices: Prices, machine: Machine | None, *, hop_seconds: float = 0.0
    ) -> None:
        self.steps, self.prices, self.costs, self.hop = steps, prices, prices.costs, hop_seconds
        self._flows = Flows(Sharing(machine)) if machine is not None else None
        self._nodes: list[_Node] = []
        self._runs: list[_Run] = []
        self._free = [0.0] * steps.devices
        self._made: dict[tuple[int, int, int], tuple[float, int]] = {}
        self._gradients: dict[tuple[int, int, int], tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._num_ended = 0
        self.step_ends = [0.0] * steps.num_steps
        self.moved_bytes = 0.0
        _Builder(self).build()

    # ---- making the graph

    def add(
        self, num_bytes: float = 0.0, road: Road = ON_HOST, after: Sequence[int | None] = ()
    ) -> int:
        """A transfer or update that starts when all of ``after`` have ended."""
        number = len(self._nodes)
        node = _Node(num_bytes=num_bytes if self._flows is not None else 0.0, road=road)
        self._nodes.append(node)
        self.moved_bytes += num_bytes
        for other in after:
            if other is not None:
                self._nodes[other].users.append(number)
                node.missing += 1
        return number

    def add_run(self, run: _Run, after: Sequence[int | None], known: Sequence[int | None]) -> int:
        """A visit's compute: ``after`` must have ended, of ``known`` only the times matter."""
        number = self.add(after=after)
        node = self._nodes[number]
        node.visit = len(self._runs)
        self._runs.append(run)
        for other in known:
            if other is not None:
                self._nodes[other].followers.append(number)
                node.missing += 1
        return number

    # ---- playing it

    def play(self) -> VisitPlayer:
        """Run everything. Raises DeadlockError if something waits for ever."""
        for number, node in enumerate(self._nodes):
            if not node.missing:
                heapq.heappush(self._heap, (0.0, number, 0))
        while True:
            when, flow = self._flows.first() if self._flows is not None else (math.inf, -1)
            if self._heap and self._heap[0][0] <= when:
                now, number, is_end = heapq.heappop(self._heap)
                if is_end:
                    self._end(number, now)
                else:
                    self._start(number, now)
            elif flow >= 0 and self._flows is not None:
                self._flows.end(flow, when)
                self._end(flow, when)
            else:
                break
        if self._num_ended < len(self._nodes):
            raise DeadlockError(f"{len(self._nodes) - self._num_ended} actions wait for ever")
        return self

    def _start(self, number: int, now: float) -> None:
        node = self._nodes[number]
        if node.visit >= 0:
            end = self._compute(self._runs[node.visit], now)
            heapq.heappush(self._heap, (end, number, 1))
            for follower in node.followers:
                self._arrive(follower, now)
        elif node.num_bytes and self._flows is not None:
            self._flows.start(number, node.num_bytes, node.road, now)
        else:
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        self._num_ended += 1
        for user in self._nodes[number].users:
            self._arrive(user, now)

    def _arrive(self, number: int, now: float) -> None:
        node = self._nodes[number]
        node.missing -= 1
        if not node.missing:
            heapq.heappush(self._heap, (now, number, 0))

    def _compute(self, run: _Run, now: float) -> float:
        """All times of one visit, whose weights are there ``now``."""
        at = max(self._free[run.device], now)
        step, device, hop = run.step, run.device, self.hop
        for microbatch in run.share:
            if run.boundary:
                when, where = self._made[step, run.boundary, microbatch]
                at = max(at, when if where == device else when + hop)
            at += run.recompute
            if run.gradient >= 0:
                when, where = self._gradients[step, run.gradient, microbatch]
                at = max(at, when if where == device else when + hop)
            at += run.rest
            for boundary in run.saves:
                self._made[step, boundary, microbatch] = at, device
            if run.gives >= 0:
                self._gradients[step, run.gives, microbatch] = at, device
        self._free[device] = at
        self.step_ends[step] = max(self.step_ends[step], at)
        return at


class _Builder:
    """Turns visits into nodes, by the rules of the passes in ``roundpipe.plan``."""

    def __init__(self, player: VisitPlayer) -> None:
        self.player, self.costs = player, player.costs
        self.computes: dict[int, list[int]] = {
            d: [] for d in range(player.steps.devices)
        }  # by device
        self.downloads: dict[int, list[int]] = {d: [] for d in range(player.steps.devices)}
        self.last_upload: dict[int, int] = {}
        self.last_download: dict[int, int] = {}
        self.sums: int | None = None
        self.host: int | None = None
        self.updates: dict[int, int] = {}  # by owner, of the step before
        self.published: dict[int, int] = {}
        self.makers: dict[tuple[int, int], int] = {}  # of this step: boundary, microbatch
        self.givers: dict[tuple[int, int], int] = {}
        self.merged = _merged(self.costs, player.steps.visits)
        self.shapes = [self.shape(visit) for visit in player.steps.visits]
        self.addends = self._addends()
        self.brought: dict[int, list[int]] = {}  # by owner the downloads of this step
        self.sums_before: dict[int, int] = {}  # by owner what added up its gradient a step before

    def trained(self, visit: Visit) -> tuple[int, ...]:
        """Owners whose gradient the visit adds to."""
        if not visit.has_backward:
            return ()
        costs = self.costs
        return tuple(dict.fromkeys(o for n in visit.layers for o in costs.owners_trained(n)))

    def shape(self, visit: Visit) -> tuple[float, float, int, tuple[int, ...], tuple[int, ...]]:
        """Seconds of forward and backward, bytes up, owners read, owners trained."""
        layers = [self.costs.layers[layer] for layer in visit.layers]
        return (
            sum(layer.forward_seconds for layer in layers),
            sum(layer.backward_seconds for layer in layers) if visit.has_backward else 0.0,
            sum(layer.weight_bytes for layer in layers),
            tuple(dict.fromkeys(o for n in visit.layers for o in self.costs.owners_read(n))),
            self.trained(visit),
        )

    def build(self) -> None:
        """All steps."""
        for step in range(self.player.steps.num_steps):
            self.makers, self.givers, self.brought = {}, {}, {}
            gives: dict[int, tuple[int, int]] = {}  # owner -> (visit, node that makes it whole)
            uploads: dict[int, list[tuple[int, int]]] = {}
            for visit, shape in zip(self.player.steps.visits, self.shapes, strict=True):
                self.visit(step, visit, shape, gives, uploads)
            self.step_end(gives, uploads)
            self.sums_before = {o: node for o, (_, node) in gives.items() if o in self.merged}

    def _addends(self) -> dict[int, list[int]]:
        """For each owner whose gradient is added up the visits that give some, in order."""
        found: dict[int, list[int]] = {}
        for visit in self.player.steps.visits:
            for owner in self.trained(visit):
                if owner in self.merged:
                    found.setdefault(owner, []).append(visit.number)
        return found

    def visit(
        self,
        step: int,
        visit: Visit,
        shape: tuple[float, float, int, tuple[int, ...], tuple[int, ...]],
        gives: dict[int, tuple[int, int]],
        uploads: dict[int, list[tuple[int, int]]],
    ) -> None:
        """One visit: its upload, compute, download and sum."""
        player = self.player
        forward, backward, weight_bytes, read, trained = shape
        device = (visit.device + step * player.steps.turn) % player.steps.devices
        earlier, sent = self.computes[device], self.downloads[device]
        fresh = self.published if player.steps.staleness else self.updates
        slot = earlier[-2] if len(earlier) > 1 else None
        ready = [fresh.get(owner) for owner in read]
        after = [self.last_upload.get(device), slot, *ready]
        upload = player.add(weight_bytes, Road(device), after)
        self.last_upload[device] = upload
        for owner in read:
            uploads.setdefault(owner, []).append((visit.number, upload))
        known = {earlier[-1]} if earlier else set()
        if visit.layers.start:
            known |= {self.makers[visit.layers.start, m] for m in visit.microbatches}
        if visit.phase is Phase.BACKWARD:
            known |= {self.givers[visit.layers.stop, m] for m in visit.microbatches}
        room = [sent[-2]] if trained and len(sent) > 1 else []
        compute = player.add_run(
            self._run(step, visit, device, (forward, backward)), [upload, *room], sorted(known)
        )
        earlier.append(compute)
        self.makers.update({(b, m): compute for b in visit.saves for m in visit.microbatches})
        if visit.has_backward:
            self.givers.update({(visit.layers.start, m): compute for m in visit.microbatches})
        if trained:
            self.gradients(visit, device, compute, trained, gives)

    def _run(self, step: int, visit: Visit, device: int, seconds: tuple[float, float]) -> _Run:
        prices, (forward, backward) = self.player.prices, seconds
        speed = prices.speeds[device] if prices.speeds else 1.0
        forward, backward, each = forward / speed, backward / speed, prices.action_seconds
        is_backward = visit.phase is Phase.BACKWARD
        return _Run(
            step=step,
            device=device,
            share=visit.microbatches,
            recompute=forward + each if is_backward else 0.0,
            rest=backward + each if is_backward else forward + backward + each,
            boundary=visit.layers.start,
            gradient=visit.layers.stop if is_backward else -1,
            saves=visit.saves,
            gives=visit.layers.start if visit.has_backward else -1,
        )

    def gradients(
        self,
        visit: Visit,
        device: int,
        compute: int,
        trained: tuple[int, ...],
        gives: dict[int, tuple[int, int]],
    ) -> None:
        """Down they come; what several visits bring is added up in their order."""
        player, layers = self.player, self.costs.layers
        size = sum(
            layers[n].gradient_bytes
            if any(owner in self.merged for owner in self.costs.owners_trained(n))
            else layers[n].whole_download_bytes
            for n in visit.layers
        )
        taken = [self.updates.get(owner) for owner in trained if owner not in self.merged]
        taken += [self.sums_before.get(owner) for owner in trained if owner in self.merged]
        down = Road(device, up=False)
        last = player.add(size, down, [self.last_download.get(device), compute, *taken])
        self.last_download[device] = last
        self.downloads[device].append(last)
        for owner in trained:
            self.brought.setdefault(owner, []).append(last)
            gives[owner] = visit.number, last
        whole = [o for o in trained if o in self.merged and self.addends[o][-1] == visit.number]
        if whole:
            brought = dict.fromkeys(node for owner in whole for node in self.brought[owner])
            self.sums = player.add(
                self._sum_bytes(whole),
                after=[self.sums, *brought, *(self.updates.get(owner) for owner in whole)],
            )
            for owner in whole:
                gives[owner] = visit.number, self.sums

    def _sum_bytes(self, whole: Sequence[int]) -> float:
        """Each visit's share of the owners that are added up is read, each owner's sum written."""
        layers, costs, wanted = self.costs.layers, self.costs, set(whole)
        total = float(sum(layers[owner].gradient_bytes for owner in wanted))
        for number in {number for owner in whole for number in self.addends[owner]}:
            for layer in self.player.steps.visits[number].layers:
                if wanted & set(costs.owners_trained(layer)):
                    total += layers[layer].gradient_bytes
        return total

    def step_end(
        self, gives: dict[int, tuple[int, int]], uploads: dict[int, list[tuple[int, int]]]
    ) -> None:
        """What the host does, in the order of ``add_updates``."""
        player, layers, prices = self.player, self.costs.layers, self.player.prices
        queue: list[tuple[int, int, int, int]] = [
            (visit, 1, -owner, owner) for owner, (visit, _) in gives.items()
        ]
        if player.steps.staleness:
            queue += [
                (max(v for v, _ in uploads[owner]) - 2 * player.steps.devices, 0, owner, owner)
                for owner in gives
            ]
        updates: dict[int, int] = {}
        for _, is_gradient, _, owner in sorted(queue):
            cost = layers[owner]
            if not is_gradient:
                after = [self.host, *(node for _, node in uploads[owner])]
                self.host = self.published[owner] = player.add(cost.publish_bytes, after=after)
            elif player.steps.eager:
                after = [self.host, gives[owner][1]]
                self.host = updates[owner] = player.add(self._update_bytes(owner), after=after)
            else:
                whole = cost.gradient_bytes if owner in self.merged else cost.whole_download_bytes
                size = prices.norm_traffic * whole
                self.host = player.add(size, after=[self.host, gives[owner][1]])
        if not player.steps.eager:
            for owner in sorted(gives):
                size = self._update_bytes(owner)
                self.host = updates[owner] = player.add(size, after=[self.host])
        self.updates = updates

    def _update_bytes(self, owner: int) -> int:
        cost = self.costs.layers[owner]
        written = cost.publish_bytes // 3 if self.player.steps.staleness else 0
        return max(cost.update_bytes - written, 0)


def _merged(costs: Costs, visits: Sequence[Visit]) -> set[int]:
    """Owners to whose gradient several contributions come, and what shares a layer with them."""
    contributions = [
        costs.owners_trained(layer)
        for visit in visits
        if visit.has_backward
        for layer in visit.layers
    ]
    counts: dict[int, int] = {}
    for owners in contributions:
        for owner in owners:
            counts[owner] = counts.get(owner, 0) + 1
    merged = {owner for owner, count in counts.items() if count > 1}
    while more := {o for owners in contributions if merged & set(owners) for o in owners} - merged:
        merged |= more
    return merged
