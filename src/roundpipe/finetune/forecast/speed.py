"""How fast: the size of microbatches, the plan for it, and what bounds the step.

A search takes seconds, so it is made for one size only: the one that is quickest when a few plain
candidates are played. A plan that host memory does not hold (replicas bring partial gradients down
into memory of their own) gives way to the quickest of its simpler relatives that it does hold.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.finetune.forecast.memory import FEW_EACH, device_need, few_stages, single_layers
from roundpipe.plan.host_bytes import host_bytes
from roundpipe.plan.partition import front, fused_choices
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.score import Scores, Setting
from roundpipe.sim.search import Plan, choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.finetune.forecast.memory import Case, DeviceNeed
    from roundpipe.plan.host_bytes import HostBytes
    from roundpipe.plan.schedule import Visit

_CPU_COPY_SECONDS_PER_BYTE = 1.5e-10  # a copy takes a core's time from computing
# For each device, that a search plays: plans found so are within 0.2 % of those found with all.
_VISITS = 25_000  # a search plays: a third of what a run's own plays, for nearly the same step
_MOST_MICROBATCHES_EACH = FEW_EACH
_PLAYED_EACH = 64  # that one plan is played with
_MOST_SIZES = 3  # of microbatches that are tried, the largest that fit
_GOOD_CUT = 2 / 3  # of a front, from few stages to many
_FEW_EACH = 4  # microbatches for each device
_BUSY = 0.9  # from here on devices compute all the time
_BOUND = 0.6  # of a step that a shared resource must work to be what bounds it


@dataclass(frozen=True)
class Speed:
    """A plan with all that can be told of it. ``case`` is what it is of."""

    case: Case
    setting: Setting
    size: int  # sequences of a microbatch
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of one step, in a chain of them."""
        return self.plan.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of sequences that are all as long as they may be."""
        return self.case.batch_size * self.case.job.length / self.seconds

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Of one step."""
        return _visits(self.setting, self.plan.candidate)

    @property
    def host(self) -> HostBytes:
        """What it keeps on the host."""
        return host_bytes(self.setting.costs, self.visits)

    @property
    def device(self) -> DeviceNeed:
        """What the device holds that holds most."""
        return _device(self.setting, self.plan.candidate)

    @property
    def busy(self) -> float:
        """Share of the step in which devices compute, between 0 and 1."""
        layers, partition = self.setting.costs.layers, self.plan.partition
        run_whole = [partition.fused, *partition.backward]
        once = sum(layers[at].forward_seconds for stage in partition.forward for at in stage)
        once += sum(
            layers[at].forward_seconds + layers[at].backward_seconds
            for stage in run_whole
            for at in stage
        )
        devices = sum(self.setting.speeds or (1.0,) * self.setting.devices)
        return min(once * self.setting.microbatches / (devices * self.seconds), 1.0)

    @property
    def bound(self) -> str:
        """What keeps the step from being shorter, in words."""
        if self.busy >= _BUSY:
            return f"compute ({arithmetic_words(self.case)})"
        shares = _shares(self)
        what = max(shares, key=lambda name: shares[name])
        if shares[what] >= _BOUND:
            return what
        is_short = self.setting.microbatches < _FEW_EACH * self.setting.devices
        return f"waiting between stages{': few microbatches' if is_short else ''}"


def arithmetic_words(case: Case) -> str:
    """The working dtype and, where it matters, how products are added up."""
    dtype = case.job.dtype
    if dtype == "fp32" or all("fp16_fp16" not in card.flops for card in case.machine.cards):
        return dtype
    return f"{dtype}, {'fp16' if case.job.fp16_accumulation else 'fp32'} accumulate"


def setting_of(case: Case, size: int) -> Setting:
    """What a plan for microbatches of ``size`` is chosen in."""
    machine = case.machine
    return Setting(
        costs=case.at(size=size),
        devices=machine.num_devices,
        microbatches=case.microbatches(size),
        machine=machine,
        staleness=case.job.staleness,
        speeds=case.speeds(size=size),
        copy_seconds_per_byte=_CPU_COPY_SECONDS_PER_BYTE if _is_on_cpu(case) else 0.0,
        most_visits=_VISITS,
    )


def best_speed(case: Case, schedule: str = "auto", *, sizes: Sequence[int]) -> Speed:
    """The quickest plan for one of the ``sizes``, within host memory where one is.

    Takes seconds. Raises PlanError if none fits the devices.
    """
    settings = {size: setting_of(case, size) for size in sizes}
    size = min(sizes, key=lambda size: (quick_seconds(settings[size]), -size))
    setting = settings[size]
    shares = schedule in ("auto", "hybrid")
    if schedule == "auto" and not _may_share(case):
        found = _searched(case, size, setting, "round_robin")
        return _relative(found, shares=not _is_on_cpu(case)) if setting.devices > 1 else found
    found = _searched(case, size, setting, schedule)
    if schedule in ("auto", "hybrid", "round_robin") and not _fits(found, found.plan.candidate):
        return _relative(found, shares=shares)
    return found


def _searched(case: Case, size: int, setting: Setting, schedule: str) -> Speed:
    """What the search finds with enough microbatches, as it is with all of them.

    A device may hold less of a step with more: what stays there for the next stage grows. Then the
    search sees all microbatches or, where they are too many for that, rounds keep them apart.
    """
    few = min(setting.microbatches, _MOST_MICROBATCHES_EACH * setting.devices)
    searched = replace(setting, microbatches=few)
    found = Speed(case, setting, size, _chosen(searched, schedule))
    if few == setting.microbatches:
        return found
    if found.device.total <= case.device_limit:
        return _with_all(found, found.plan.candidate)
    if setting.microbatches <= _PLAYED_EACH * setting.devices:
        with suppress(PlanError):  # not all at once: in rounds
            return replace(found, plan=_chosen(setting, schedule))
    for rounds in (2**power for power in range(1, 24)):
        apart = replace(found.plan.candidate, rounds=rounds)
        if rounds > setting.microbatches or _device(setting, apart).total <= case.device_limit:
            break
    if rounds > setting.microbatches:
        raise PlanError(f"no plan fits: {setting.microbatches:,} microbatches at once")
    return _with_all(found, apart)


def _chosen(setting: Setting, schedule: str) -> Plan:
    """What the search finds; single layers dealt in turn where only these fit."""
    if schedule in ("auto", "hybrid") and setting.machine is not None:
        with suppress(PlanError):  # replicas take host memory: first without those that it lacks
            limit = setting.machine.host.memory_bytes
            return choose(replace(setting, host_limit=limit), schedule)
    try:
        return choose(setting, schedule)
    except PlanError:
        if schedule not in ("auto", "round_robin"):
            raise
        least = Candidate(single_layers(setting.costs), speeds=setting.speeds)
        seconds = Scores(setting).of(least)
        if not math.isfinite(seconds):
            raise
        one_by_one = (*least.partition.forward, least.partition.fused)
        return Plan(least, one_by_one, seconds, setting.even_seconds, "the least that fits")


def _with_all(found: Speed, candidate: Candidate) -> Speed:
    """A plan that was found with few microbatches, with the seconds of all."""
    seconds = _all_seconds(found.setting, candidate)
    share = seconds / found.plan.seconds
    others = tuple((name, each * share) for name, each in found.plan.alternatives)
    plan = replace(found.plan, candidate=candidate, seconds=seconds, alternatives=others)
    return replace(found, plan=plan)


def _all_seconds(setting: Setting, candidate: Candidate) -> float:
    """Seconds of a step; of very many microbatches the last ones take as long as those before."""
    most, rounds = _PLAYED_EACH * setting.devices, candidate.rounds
    if setting.microbatches <= most:
        return Scores(setting).of(candidate)
    each = -(-setting.microbatches // rounds)
    if 2 * each > most:  # rounds so large cost next to nothing
        each, rounds = most // 2, 1
    many = most // each
    few = many // 2
    half, whole = (
        Scores(replace(setting, microbatches=count * each)).of(
            replace(candidate, rounds=count if rounds > 1 else 1)
        )
        for count in (few, many)
    )
    return whole + (whole - half) / (many - few) / each * (setting.microbatches - many * each)


def likely_sizes(case: Case) -> list[int]:
    """The sizes worth playing: the largest that fit and leave each device a microbatch."""
    fitting = case.sizes()
    enough = [s for s in fitting if case.microbatches(s) >= case.machine.num_devices]
    return (enough or fitting[:1])[-_MOST_SIZES:]


def quick_seconds(setting: Setting) -> float:
    """Seconds of a step by the best of a few plain candidates, about; infinite if none fits."""
    count = setting.microbatches
    few = min(count, _MOST_MICROBATCHES_EACH * setting.devices)
    setting = replace(setting, microbatches=few)
    scores, limit = Scores(setting), memory_limit(setting)
    try:
        fuses = fused_choices(setting.costs, limit)
    except PlanError:
        return math.inf
    found = []
    for fuse in {fuses[0], fuses[len(fuses) // 2]}:
        try:
            cuts = front(
                setting.costs, memory_limit=limit, fuse=fuse, most_fused=fuse if fuse > 1 else None
            )
        except PlanError:
            continue
        cut = Candidate(cuts[round((len(cuts) - 1) * _GOOD_CUT)], speeds=setting.speeds)
        for copies in {1, setting.devices}:
            found.append(scores.of(cut.with_replicas(copies, copies, copies)))
    return min(found, default=math.inf) * count / few


def memory_limit(setting: Setting) -> int:
    """Bytes of the smallest device."""
    assert setting.machine is not None
    return min(card.memory_bytes for card in setting.machine.cards)


def bound_seconds(case: Case, *, size: int, length: int | None = None) -> float:
    """No step is shorter: work spread evenly, Python, and what must pass through host memory."""
    of = case.at(size=size, length=length)
    devices = case.machine.num_devices
    speeds = case.speeds(size=size)
    setting = Setting(
        costs=of, devices=devices, microbatches=case.microbatches(size), speeds=speeds
    )
    moved = sum(
        2 * layer.weight_bytes + 2 * layer.whole_download_bytes + layer.update_bytes
        for layer in of.layers
    )
    return max(setting.even_seconds, setting.python_seconds, moved / case.machine.host.bandwidth)


def _is_on_cpu(case: Case) -> bool:
    return all(card.in_host for card in case.machine.cards)


def _may_share(case: Case) -> bool:
    """Whether replicas could be used: on the CPU they bring nothing, elsewhere they take memory."""
    if _is_on_cpu(case) or case.machine.num_devices == 1:
        return False
    few = min(case.batch_size, FEW_EACH * case.machine.num_devices)  # of a round; there may be many
    least = case.least_host(size=1, batch=few)
    sums = sum(layer.gradient_bytes for layer in case.at(size=1).layers)
    return least.total + 2 * sums <= case.machine.host.memory_bytes


def _needs(found: Speed, candidate: Candidate) -> int:
    """Host memory that a candidate takes in all."""
    need = host_bytes(found.setting.costs, _visits(found.setting, candidate))
    if not any(card.in_host for card in found.case.machine.cards):
        return need.total  # what a device holds takes long to count, and none of it is here
    return found.case.host_total(need, _device(found.setting, candidate))


def _fits(found: Speed, candidate: Candidate) -> bool:
    return _needs(found, candidate) <= found.case.machine.host.memory_bytes


def _relative(found: Speed, *, shares: bool) -> Speed:
    """The quickest of a plan and its relatives that host memory holds; of none, the least."""
    plan, has = found.plan, found.case.machine.host.memory_bytes
    every = dict.fromkeys(
        [plan.candidate, *_relatives(plan.candidate, found.setting, shares=shares)]
    )
    needs = {each: _needs(found, each) for each in every}
    fitting = [each for each in every if needs[each] <= has]
    seconds = {each: _all_seconds(found.setting, each) for each in fitting}
    best = min(seconds, key=lambda each: seconds[each], default=plan.candidate)
    if not math.isfinite(seconds.get(best, math.inf)):  # no device holds one that the host holds
        seconds |= {each: _all_seconds(found.setting, each) for each in every if needs[each] > has}
        able = [each for each in every if math.isfinite(seconds[each])]
        best = min(able, key=lambda each: needs[each], default=plan.candidate)
    if best == plan.candidate:
        return found
    name = plan.candidate.name(found.setting.devices)
    others = [*((other, each) for other, each in plan.alternatives if other != name)]
    alternatives = tuple(sorted([*others, (name, plan.seconds)], key=lambda pair: pair[1]))
    changed = replace(plan, candidate=best, seconds=seconds[best], alternatives=alternatives)
    return replace(found, plan=changed)


def _relatives(candidate: Candidate, setting: Setting, *, shares: bool) -> Iterator[Candidate]:
    """The same stages on fewer devices at once, and in more rounds."""
    plain = replace(candidate, rounds=1)
    count = setting.devices
    if shares and not candidate.is_bound:
        r = candidate.replicas
        options = (
            sorted({1, max(r.forward, count // 2)}),
            sorted({1, max(r.fused // 2, 1), r.fused, count // 2}),
            sorted({1, max(r.backward // 2, 1)}),
        )
        for copies in product(*options):
            if copies != (r.forward, r.fused, r.backward):
                yield plain.with_replicas(*copies)
    yield plain.with_replicas(1, 1, 1)
    fewest = few_stages(setting.costs, memory_limit(setting))  # saved inputs
    yield replace(plain.with_replicas(1, 1, 1), partition=fewest)
    rounds = 2
    while rounds * count <= setting.microbatches:
        yield replace(plain.with_replicas(1, 1, 1), rounds=rounds)
        if shares and not candidate.is_bound:
            yield replace(plain, rounds=rounds)
        rounds *= 2


def _visits(setting: Setting, candidate: Candidate) -> tuple[Visit, ...]:
    return candidate.visits(
        setting.costs, devices=setting.devices, microbatches=setting.microbatches
    )


def _device(setting: Setting, candidate: Candidate) -> DeviceNeed:
    return device_need(
        setting.costs, candidate, devices=setting.devices, microbatches=setting.microbatches
    )


def _shares(found: Speed) -> dict[str, float]:
    """Share of the step in which each shared resource works."""
    setting, machine = found.setting, found.case.machine
    layers = setting.costs.layers
    up = down = on_host = 0.0
    merged = found.host.partial_sums
    for visit in found.visits:
        held = layers[visit.layers.start : visit.layers.stop]
        boundary = layers[visit.layers.start].boundary_bytes * len(visit.microbatches)
        up += sum(layer.weight_bytes for layer in held) + boundary
        down += boundary
        if visit.has_backward:
            down += sum(layer.whole_download_bytes for layer in held)
    on_host += 3.0 * merged + sum(
        layer.update_bytes + layer.whole_download_bytes for layer in layers
    )
    links = (
        max((max(up / link.up, down / link.down) for link in machine.links), default=0.0)
        / setting.devices
    )
    return {
        "Python (one process issues all work)": setting.python_seconds / found.seconds,
        "links": links / found.seconds,
        "host memory": (up + down + on_host) / machine.host.bandwidth / found.seconds,
    }
