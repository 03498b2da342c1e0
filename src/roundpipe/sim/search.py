"""Choose a plan: play candidates on the costs and the machine, take the quickest.

Not all combinations are played. From each start (round-robin, everything replicated, what host
memory can feed) the search changes one thing at a time, as long as that gains: how finely stages
are cut, how many top layers are fused, on how many devices at once each kind of stage runs, rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from roundpipe.errors import ConfigError, NoRoomError, PlanError
from roundpipe.plan.generators import Replicas
from roundpipe.plan.memory import room_of
from roundpipe.plan.partition import Partition, even_stages, front, fused_choices, layer_by_layer
from roundpipe.plan.uneven import UnevenDevices, split_forward, tapered, uneven_front
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.chosen import Plan, plan_of
from roundpipe.sim.score import Scores, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.generators import DealName
    from roundpipe.plan.shares import Favours

__all__ = ["Plan", "ScheduleName", "Setting", "choose", "given", "require_plan"]

ScheduleName = Literal["auto", "round_robin", "hybrid", "replicated", "gpipe"]
_NEAR = 0.01  # plans closer than this are as good as each other
_REPLICAS_PAY = 0.01  # auto leaves round-robin for no less: then bits depend on the devices
_PARTITIONS = 14  # of a front, at most
_STARTS = 6  # that are climbed from, the best first
_TURNS = 4  # rounds of changing one thing at a time


def choose(setting: Setting, name: str = "auto", *, like: Candidate | None = None) -> Plan:
    """The quickest plan of a step, of those a schedule's name allows.

    ``round_robin``: every stage on one device and all microbatches in one round, so that the same
    number of microbatches gives the same bits on any number of devices. ``replicated``: every stage
    on all devices. ``hybrid``: a number of its own for each kind of stage, and rounds. ``gpipe``:
    stages stay on their devices. ``auto``: round-robin, unless a hybrid gains 1 %. ``like``: only
    what gives the same bits as that candidate, which is the answer where nothing else fits.

    Raises ConfigError for an unknown name, PlanError if nothing fits.
    """
    if name not in get_args(ScheduleName):
        raise ConfigError(f"unknown schedule: {name}\nhint: {', '.join(get_args(ScheduleName))}")
    if like is not None:
        return _choose_alike(setting, like)
    search = _Search(setting)
    if name == "gpipe":
        found = search.bound()
    elif name == "replicated":
        found = search.climb([search.start((setting.devices,) * 3)], frozenset({"cut", "fuse"}))
    else:
        found = search.climb([search.start((1, 1, 1))], frozenset({"cut", "fuse"}))
        if name != "round_robin" and math.isinf(search.scores.of(found)):
            found = search.in_rounds(found)
        if name == "hybrid" or (name == "auto" and setting.devices > 1):
            allowed = frozenset({"cut", "fuse", "replicas", "rounds", "deal"})
            shared = search.climb([found, *search.shared_starts()], allowed)
            pays = search.scores.of(found) * (1 - _REPLICAS_PAY)
            if name == "hybrid" or search.scores.of(shared) < pays:
                found = shared
    search.require(found)
    return search.plan(found)


def require_plan(setting: Setting, name: str = "auto") -> None:
    """Raise what ``choose`` would, in a part of its time: where a first try fits, the best does."""
    copies = {"replicated": (setting.devices,) * 3}.get(name, (1, 1, 1))
    if name in get_args(ScheduleName) and name != "gpipe":
        search = _Search(setting)
        if math.isfinite(search.scores.of(search.start(copies))):
            return
    choose(setting, name)


def _choose_alike(setting: Setting, like: Candidate) -> Plan:
    """The quickest plan with the bits of ``like``.

    What a device adds up by itself it adds up in the order of microbatches, however layers are cut
    and whether they are recomputed. So the cut is free where all microbatches of a round go through
    a layer's backward on one device, or on as many whether it is fused or not; otherwise the number
    of fused layers stays. Devices of unequal speed get shares by the costs: then nothing is free.
    """
    copies, speeds = like.replicas, setting.speeds or (1.0,)
    is_shared = like.num_copies > 3
    if copies.ramp_stages or (is_shared and min(speeds) < max(speeds)):
        return _Search(setting).plan(like)
    num_fused = None if copies.fused == copies.backward else len(like.partition.fused)
    search = _Search(setting, num_fused=num_fused)
    try:
        found = search.bound() if like.is_bound else search.climb_from(like)
    except PlanError:
        found = like
    return search.plan(search.best([like, found]))


@dataclass(frozen=True)
class _Shape:
    """Where a partition comes from: a place on a front, and what was cut further."""

    fuse: int
    place: int
    pieces: int = 1  # of each forward stage
    ramp_stages: int = 0  # at both ends of a step, cut in two


class _Search:
    """One search: fronts, scores and what may be changed. ``num_fused`` layers, if it is given."""

    def __init__(self, setting: Setting, *, num_fused: int | None = None) -> None:
        self.setting, self._num_fused = setting, num_fused
        self.scores = Scores(setting)
        self._fronts: dict[int, list[Partition]] = {}
        self._shapes: dict[Partition, _Shape] = {}

    @cached_property
    def fuses(self) -> list[int]:
        """How many top layers may be fused."""
        if self._num_fused is not None:
            return [self._num_fused]
        setting, costs = self.setting, self.setting.costs
        if setting.by_layer:
            return [1]
        most = setting.most_fused or costs.num_layers
        choices = [k for k in fused_choices(costs, self.memory_limit) if k <= most]
        if setting.longest is None:
            return choices
        tops = {k: range(costs.num_layers - k, costs.num_layers) for k in choices}
        return [k for k in choices if k == 1 or _both(costs, tops[k]) <= setting.longest]

    @cached_property
    def memory_limit(self) -> int | None:
        """Of the smallest device, without the boundaries that stay there from visit to visit.

        Where that leaves too little for a layer, all of it: what a candidate takes is counted.
        """
        limit, setting = self.setting.device_bytes, self.setting
        if limit is None:
            return None
        largest = max(layer.boundary_bytes for layer in setting.costs.layers)
        left = limit - largest * -(-setting.microbatches // setting.devices)
        try:
            room_of(setting.costs, left, 1)
        except PlanError:
            return limit
        return left

    def front(self, fuse: int) -> list[Partition]:
        """Cuts with so many layers fused, from few stages to many, thinned out."""
        if fuse not in self._fronts:
            whole = self._whole_front(fuse)
            count = min(len(whole), _PARTITIONS)
            step = (len(whole) - 1) / max(count - 1, 1)
            cuts = [whole[round(at * step)] for at in range(count)]
            self._fronts[fuse] = cuts
            self._shapes.update({cut: _Shape(fuse, at) for at, cut in enumerate(cuts)})
        return self._fronts[fuse]

    def _whole_front(self, fuse: int) -> list[Partition]:
        """All of it; where memory is scarce, for both ways to share it."""
        if self.setting.by_layer and fuse == 1:
            if self.memory_limit is not None:
                room_of(self.setting.costs, self.memory_limit, 1)
            return [layer_by_layer(self.setting.costs)]
        ways: tuple[Favours, ...] = ("even",)
        if self.memory_limit is not None:
            ways = ("even", "backward")
        found: dict[Partition, None] = {}
        for favours in ways:
            cuts = front(
                self.setting.costs,
                memory_limit=self.memory_limit,
                fuse=fuse,
                most_fused=fuse if fuse > 1 or self._num_fused else None,
                longest=self.setting.longest,
                favours=favours,
            )
            found.update(dict.fromkeys(cuts))
        return sorted(found, key=lambda cut: cut.num_stages)

    def cut(self, shape: _Shape) -> Partition | None:
        """The partition of a shape; None if there is no such place."""
        cuts = self.front(shape.fuse)
        if not 0 <= shape.place < len(cuts):
            return None
        partition = cuts[shape.place]
        if shape.pieces > 1:
            partition = split_forward(partition, self.setting.costs, pieces=shape.pieces)
        if shape.ramp_stages:
            costs, stages = self.setting.costs, shape.ramp_stages
            partition = tapered(partition, costs, stages=stages, pieces=2)
        self._shapes.setdefault(partition, shape)
        return partition

    def start(self, copies: tuple[int, int, int]) -> Candidate:
        """The best of a few cuts with so many replicas."""
        cuts = self.front(self.fuses[0])
        some = [cuts[round(at * (len(cuts) - 1) / 3)] for at in range(4)]
        speeds = self.setting.speeds
        if speeds is not None and copies == (1, 1, 1) and not self.setting.by_layer:
            some += self.uneven(speeds)
        return self.best(Candidate(c, speeds=speeds).with_replicas(*copies) for c in some)

    def uneven(self, speeds: Sequence[float]) -> list[Partition]:
        """Stages as long as the device is fast that they are dealt to in turn; if layers fit so."""
        limits, machine = self.memory_limit, self.setting.machine
        held = None if limits is None else [limits] * len(speeds)
        if machine is not None:
            held = [min(card.memory_bytes, limits or card.memory_bytes) for card in machine.cards]
        try:
            cuts = uneven_front(UnevenDevices(self.setting.costs, speeds, held))
        except PlanError:
            return []
        return [cuts[round(at * (len(cuts) - 1) / 5)] for at in range(6)]

    def shared_starts(self) -> list[Candidate]:
        """Everything on all devices; on as many as host memory can feed; the last stage alone."""
        count, fed = self.setting.devices, self.fed()
        copies = {(count,) * 3, (fed,) * 3, (1, count, 1), (max(fed // 4, 1), count, fed)}
        copies.add((1, min(3, count), min(2, count)))
        starts = [self.start(some) for some in sorted(copies)]
        return sorted(starts, key=self.scores.of)[:_STARTS]

    def fed(self) -> int:
        """The most replicas whose transfers and sums, with the update, take a step's work at most.

        Each replica brings up all weights twice and down its fp32 sums, which are added up.
        """
        setting, layers = self.setting, self.setting.costs.layers
        if setting.machine is None:
            return setting.devices
        once = sum(layer.update_bytes for layer in layers)
        each = sum(2 * layer.weight_bytes + 2 * layer.gradient_bytes for layer in layers)
        room = 0.95 * setting.machine.host.bandwidth * setting.even_seconds - once
        return int(min(max(room // max(each, 1), 1), setting.devices))

    def best(self, candidates: Iterator[Candidate] | Sequence[Candidate]) -> Candidate:
        """The quickest; of those nearly as quick the one nearest to plain, with fewest stages."""
        known = [(self.scores.of(each), each) for each in dict.fromkeys(candidates)]
        near = min(seconds for seconds, _ in known) * (1 + _NEAR / 10)
        return min(
            (pair for pair in known if pair[0] <= near),
            key=lambda pair: (pair[1].num_copies, pair[1].partition.num_stages, pair[0]),
        )[1]

    def climb(self, starts: Sequence[Candidate], allowed: frozenset[str]) -> Candidate:
        """From the starts change one thing at a time while that gains."""
        found = []
        for start in starts:
            here = start
            for _ in range(_TURNS):
                before = here
                for what in ("cut", "replicas", "fuse", "rounds", "deal"):
                    if what in allowed and self.scores.num_visits < self.setting.most_visits:
                        here = self.best([here, *getattr(self, f"_{what}")(here)])
                if here == before:
                    break
            found.append(here)
        return self.best(found)

    def in_rounds(self, here: Candidate) -> Candidate:
        """The same in as few rounds as fit: fewer microbatches stay on a device at once."""
        cuts, rounds = self.front(self.fuses[0]), 2
        some = [cuts[round(at * (len(cuts) - 1) / 3)] for at in range(4)]
        while rounds <= self.setting.microbatches:
            found = self.best([replace(here, partition=cut, rounds=rounds) for cut in some])
            if math.isfinite(self.scores.of(found)):
                return self.climb([found], frozenset({"cut", "fuse"}))
            rounds *= 2
        return here

    def climb_from(self, like: Candidate) -> Candidate:
        """The best of other cuts, with the replicas and rounds of ``like``."""
        cuts = self.front(self.fuses[0])
        some = {cuts[round(at * (len(cuts) - 1) / 3)] for at in range(4)}
        start = self.best([replace(like, partition=cut) for cut in cuts if cut in some])
        allowed = {"cut"} if self._num_fused is not None else {"cut", "fuse"}
        return self.climb([start], frozenset(allowed))

    # ---- what may be changed

    def _cut(self, here: Candidate) -> Iterator[Candidate]:
        shape = self._shapes.get(here.partition)
        if shape is None:  # cut for devices of unequal speed
            return
        others = [replace(shape, place=shape.place + by) for by in (-2, -1, 1, 2)]
        whole = self.setting.costs.num_layers  # so many pieces are single layers
        others += [replace(shape, pieces=count) for count in (*_around(shape.pieces), whole)]
        others += [replace(shape, ramp_stages=count) for count in (0, 1, 2, 4)]
        yield from self._shaped(here, others)

    def _fuse(self, here: Candidate) -> Iterator[Candidate]:
        shape, others = self._shapes.get(here.partition, _Shape(1, 0)), []
        count = here.partition.num_stages
        for fuse in self.fuses:
            try:
                cuts = self.front(fuse)
            except PlanError:
                continue
            near = min(range(len(cuts)), key=lambda at: abs(cuts[at].num_stages - count))
            others.append(replace(shape, fuse=fuse, place=near))
        yield from self._shaped(here, others)

    def _shaped(self, here: Candidate, shapes: Sequence[_Shape]) -> Iterator[Candidate]:
        for shape in shapes:
            partition = self.cut(shape)
            if partition is not None:
                yield replace(here, partition=partition)

    def _replicas(self, here: Candidate) -> Iterator[Candidate]:
        now = (here.replicas.forward, here.replicas.fused, here.replicas.backward)
        for kind in range(3):
            for count in {*_around(now[kind]), 1, self.setting.devices} - {now[kind]}:
                if count <= self.setting.devices:
                    copies = [*now]
                    copies[kind] = count
                    yield here.with_replicas(*copies)

    def _deal(self, here: Candidate) -> Iterator[Candidate]:
        if here.num_copies > 3:
            others: tuple[DealName, ...] = ("cyclic", "earliest", "levelled")
            for other in others:
                yield replace(here, deal=other)

    def _rounds(self, here: Candidate) -> Iterator[Candidate]:
        for rounds in (here.rounds * 2, here.rounds // 2):
            if rounds >= 1 and rounds * self.setting.devices <= self.setting.microbatches:
                yield replace(here, rounds=rounds)

    def bound(self) -> Candidate:
        """GPipe: one stage a device, as even as layers allow."""
        count = self.setting.devices
        cuts = even_stages(self.setting.costs, count)
        partition = Partition(tuple(cuts[:-1]), cuts[-1], tuple(cuts[-2::-1]))
        lowest = self.setting.costs.first_trainable
        below = [s for s in partition.backward if lowest is not None and s.stop > lowest]
        trained = tuple(range(max(s.start, lowest or 0), s.stop) for s in below)
        return Candidate(Partition(partition.forward, partition.fused, trained), is_bound=True)

    # ---- the end

    def require(self, candidate: Candidate) -> None:
        """Raise NoRoomError, with the way out, if even the best of all found does not fit."""
        if math.isfinite(self.scores.of(candidate)):
            return
        if self.scores.refusal is not None:
            raise self.scores.refusal
        need, limit = self.scores.least_bytes, self.setting.device_bytes
        raise NoRoomError(
            f"no plan fits on the device: {need} bytes of {limit}\n"
            f"hint: device_memory_limit={need} if the device has it, or num_microbatch=… for "
            "smaller ones"
        )

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of what was found."""
        best: dict[str, float] = {}
        for each, seconds in self.scores.seconds.items():
            name = each.name(self.setting.devices)
            best[name] = min(best.get(name, seconds), seconds)
        name, seconds = candidate.name(self.setting.devices), self.scores.of(candidate)
        others = sorted((kept, other) for other, kept in best.items() if other != name)
        what = f"best of {len(self.scores.seconds)} tried"
        if others:
            what += f"; {others[0][1]} {others[0][0] / seconds - 1:+.0%}"
        alternatives = tuple((other, kept) for kept, other in others)
        return plan_of(self.setting, candidate, seconds, what, alternatives)


def _around(count: int) -> tuple[int, ...]:
    """Other counts near ``count``, above and below."""
    return tuple(sorted({max(count // 2, 1), count + 1, count * 2} - {count}))


def given(setting: Setting, partition: Partition, replicas: Replicas | None = None) -> Plan:
    """A plan with stages given by hand."""
    candidate = Candidate(partition, replicas or Replicas(), speeds=setting.speeds)
    seconds = Scores(setting).of(candidate)
    return plan_of(setting, candidate, seconds, "given by hand", ())


def _both(costs: Costs, stage: range) -> float:
    layers = costs.layers[stage.start : stage.stop]
    return sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
