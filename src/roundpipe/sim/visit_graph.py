"""The graph of a chain of steps, a node a visit: what ``VisitPlayer`` plays.

Made from visits alone, by the rules of the passes in ``roundpipe.plan``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.plan.schedule import Phase
from roundpipe.sim.sharing import ON_HOST, Road

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit
    from roundpipe.sim.work import Prices


@dataclass(slots=True)
class Node:
    """Something with one end: a visit's compute (``visit``), a transfer, or an update."""

    missing: int = 0
    users: list[int] = field(default_factory=list)
    num_bytes: float = 0.0
    road: Road = ON_HOST
    visit: int = -1  # of a compute node: which visit of the chain
    followers: list[int] = field(default_factory=list)  # compute nodes that only have to know it


@dataclass(slots=True)
class Run:
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


class VisitGraph:
    """Nodes and runs of ``steps``, which do not depend on a machine."""

    def __init__(self, steps: Steps, prices: Prices) -> None:
        self.steps, self.prices, self.costs = steps, prices, prices.costs
        self.nodes: list[Node] = []
        self.runs: list[Run] = []
        self.moved_bytes = 0.0
        _Builder(self).build()

    def add(
        self, num_bytes: float = 0.0, road: Road = ON_HOST, after: Sequence[int | None] = ()
    ) -> int:
        """A transfer or update that starts when all of ``after`` have ended."""
        number = len(self.nodes)
        node = Node(num_bytes=num_bytes, road=road)
        self.nodes.append(node)
        self.moved_bytes += num_bytes
        for other in after:
            if other is not None:
                self.nodes[other].users.append(number)
                node.missing += 1
        return number

    def add_run(self, run: Run, after: Sequence[int | None], known: Sequence[int | None]) -> int:
        """A visit's compute: ``after`` must have ended, of ``known`` only the times matter."""
        number = self.add(after=after)
        node = self.nodes[number]
        node.visit = len(self.runs)
        self.runs.append(run)
        for other in known:
            if other is not None:
                self.nodes[other].followers.append(number)
                node.missing += 1
        return number


class _Builder:
    """Turns visits into nodes, by the rules of the passes in ``roundpipe.plan``."""

    def __init__(self, graph: VisitGraph) -> None:
        self.graph, self.costs = graph, graph.costs
        self.computes: dict[int, list[int]] = {
            d: [] for d in range(graph.steps.devices)
        }  # by device
        self.downloads: dict[int, list[int]] = {d: [] for d in range(graph.steps.devices)}
        self.last_upload: dict[int, int] = {}
        self.last_download: dict[int, int] = {}
        self.sums: int | None = None
        self.host: int | None = None
        self.updates: dict[int, int] = {}  # by owner, of the step before
        self.published: dict[int, int] = {}
        self.makers: dict[tuple[int, int], int] = {}  # of this step: boundary, microbatch
        self.givers: dict[tuple[int, int], int] = {}
        self.merged = _merged(self.costs, graph.steps.visits)
        self.shapes = [self.shape(visit) for visit in graph.steps.visits]
        self.groups = self._groups()  # by visit the visits that are added up with it
        self.users = list(self.groups)
        self.rank = {visit: rank for rank, visit in enumerate(self.users)}
        self.brought: dict[int, int] = {}  # by visit its download in this step
        self.begun: set[int] = set()  # owners to whose sum something was added in this step
        self.merges: dict[tuple[int, int], int] = {}  # by step and last visit of a group

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
        for step in range(self.graph.steps.num_steps):
            self.makers, self.givers, self.brought, self.begun = {}, {}, {}, set()
            gives: dict[int, tuple[int, int]] = {}  # owner -> (visit, node that makes it whole)
            uploads: dict[int, list[tuple[int, int]]] = {}
            for visit, shape in zip(self.graph.steps.visits, self.shapes, strict=True):
                self.visit(step, visit, shape, gives, uploads)
            self.step_end(gives, uploads)

    def _groups(self) -> dict[int, list[int]]:
        """For each visit that brings partial sums all that are added up with it, in order."""
        found: dict[int, list[int]] = {}
        visits = self.graph.steps.visits
        for visit in visits:
            if self.merged.isdisjoint(self.trained(visit)):
                continue
            before = found.get(visit.number - 1, [])
            devices = {visits[number].device for number in before}
            if before and visits[before[-1]].stage == visit.stage and visit.device not in devices:
                before.append(visit.number)
                found[visit.number] = before
            else:
                found[visit.number] = [visit.number]
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
        graph = self.graph
        forward, backward, weight_bytes, read, trained = shape
        device = (visit.device + step * graph.steps.turn) % graph.steps.devices
        earlier, sent = self.computes[device], self.downloads[device]
        fresh = self.published if graph.steps.staleness else self.updates
        slot = earlier[-2] if len(earlier) > 1 else None
        ready = [fresh.get(owner) for owner in read]
        after = [self.last_upload.get(device), slot, *ready]
        upload = graph.add(weight_bytes, Road(device), after)
        self.last_upload[device] = upload
        for owner in read:
            uploads.setdefault(owner, []).append((visit.number, upload))
        known = {earlier[-1]} if earlier else set()
        if visit.layers.start:
            known |= {self.makers[visit.layers.start, m] for m in visit.microbatches}
        if visit.phase is Phase.BACKWARD:
            known |= {self.givers[visit.layers.stop, m] for m in visit.microbatches}
        room = [sent[-2]] if trained and len(sent) > 1 else []
        compute = graph.add_run(
            self._run(step, visit, device, (forward, backward)), [upload, *room], sorted(known)
        )
        earlier.append(compute)
        self.makers.update({(b, m): compute for b in visit.saves for m in visit.microbatches})
        if visit.has_backward:
            self.givers.update({(visit.layers.start, m): compute for m in visit.microbatches})
        if trained:
            self.gradients((step, visit, device), compute, trained, gives)

    def _run(self, step: int, visit: Visit, device: int, seconds: tuple[float, float]) -> Run:
        prices, (forward, backward) = self.graph.prices, seconds
        speed = prices.speeds[device] if prices.speeds else 1.0
        forward, backward, each = forward / speed, backward / speed, prices.action_seconds
        is_backward = visit.phase is Phase.BACKWARD
        return Run(
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
        place: tuple[int, Visit, int],
        compute: int,
        trained: tuple[int, ...],
        gives: dict[int, tuple[int, int]],
    ) -> None:
        """Down they come; what the visits of a stage bring is added up at once, in their order."""
        graph, layers, (step, visit, device) = self.graph, self.costs.layers, place
        size = sum(
            layers[n].gradient_bytes
            if any(owner in self.merged for owner in self.costs.owners_trained(n))
            else layers[n].whole_download_bytes
            for n in visit.layers
        )
        taken = [self.updates.get(owner) for owner in trained if owner not in self.merged]
        if visit.number in self.groups:
            taken.append(self._free_on_host(step, visit.number))
        down = Road(device, up=False)
        last = graph.add(size, down, [self.last_download.get(device), compute, *taken])
        self.last_download[device] = self.brought[visit.number] = last
        self.downloads[device].append(last)
        for owner in trained:
            gives[owner] = visit.number, last
        group = self.groups.get(visit.number, [-1])
        if group[-1] == visit.number:
            self._merge(step, group, gives)

    def _free_on_host(self, step: int, visit: int) -> int | None:
        """The merge that frees the place for a visit's partial sums."""
        users, count = self.users, 2 * self.graph.steps.devices
        rank = self.rank[visit]
        if rank >= count:
            return self.merges[step, self.groups[users[rank - count]][-1]]
        last = users[rank + (len(users) - 1 - rank) // count * count]
        return self.merges.get((step - 1, self.groups[last][-1]))

    def _merge(self, step: int, group: Sequence[int], gives: dict[int, tuple[int, int]]) -> None:
        visits = self.graph.steps.visits
        every = [owner for number in group for owner in self.trained(visits[number])]
        whole = [owner for owner in dict.fromkeys(every) if owner in self.merged]
        brought = [self.brought[number] for number in group]
        self.sums = self.merges[step, group[-1]] = self.graph.add(
            self._sum_bytes(group, whole),
            after=[self.sums, *brought, *(self.updates.get(owner) for owner in whole)],
        )
        for owner in whole:
            gives[owner] = group[-1], self.sums
        self.begun.update(whole)

    def _sum_bytes(self, group: Sequence[int], whole: Sequence[int]) -> float:
        """What visits brought is read, each owner's sum written, and read if it was begun."""
        layers, costs, wanted = self.costs.layers, self.costs, set(whole)
        total = float(sum(layers[owner].gradient_bytes for owner in whole))
        total += sum(layers[owner].gradient_bytes for owner in wanted & self.begun)
        for number in group:
            for layer in self.graph.steps.visits[number].layers:
                if wanted & set(costs.owners_trained(layer)):
                    total += layers[layer].gradient_bytes
        return total

    def step_end(
        self, gives: dict[int, tuple[int, int]], uploads: dict[int, list[tuple[int, int]]]
    ) -> None:
        """What the host does, in the order of ``add_updates``."""
        graph, layers, prices = self.graph, self.costs.layers, self.graph.prices
        queue: list[tuple[int, int, int, int]] = [
            (visit, 1, -owner, owner) for owner, (visit, _) in gives.items()
        ]
        if graph.steps.staleness:
            queue += [
                (max(v for v, _ in uploads[owner]) - 2 * graph.steps.devices, 0, owner, owner)
                for owner in gives
            ]
        updates: dict[int, int] = {}
        for _, is_gradient, _, owner in sorted(queue):
            cost = layers[owner]
            if not is_gradient:
                after = [self.host, *(node for _, node in uploads[owner])]
                self.host = self.published[owner] = graph.add(cost.publish_bytes, after=after)
                continue
            whole = cost.gradient_bytes if owner in self.merged else cost.whole_download_bytes
            norm, after = prices.norm_traffic * whole, [self.host, gives[owner][1]]
            if graph.steps.eager:
                size = self._update_bytes(owner) + norm
                self.host = updates[owner] = graph.add(size, after=after)
            else:
                self.host = graph.add(norm, after=after)
        if not graph.steps.eager:
            for owner in sorted(gives):
                size = self._update_bytes(owner)
                self.host = updates[owner] = graph.add(size, after=[self.host])
        self.updates = updates

    def _update_bytes(self, owner: int) -> int:
        cost = self.costs.layers[owner]
        written = cost.publish_bytes // 3 if self.graph.steps.staleness else 0
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
