"""What fits: memory of devices and host, disk, and the longest sequence, without playing a step.

Everything here is arithmetic on costs, microseconds to milliseconds, so that hints and the longest
sequence are found by trying.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.models.estimate.costs import costs
from roundpipe.models.estimate.disk import disk
from roundpipe.plan.host_bytes import HostBytes, host_bytes
from roundpipe.plan.memory import microbatch_bytes, slot_bytes
from roundpipe.plan.partition import Partition
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.schedule_memory import schedule_bytes
from roundpipe.plan.shares import shares_of
from roundpipe.sim.candidate import Candidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.models.estimate.costs import Job
    from roundpipe.models.estimate.disk import Disk
    from roundpipe.models.estimate.profile import Profile
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine

_LONGEST = 1 << 24  # tokens; no memory holds more
FEW_EACH = 4  # microbatches for each device: of more, rounds keep what devices hold apart


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes of the device that holds most, and the stage because of which it does.

    ``weights`` are those of the stage with its fp32 sums of gradients, once; ``microbatch`` what
    one microbatch takes beside them.
    """

    total: int
    layers: range
    weights: int
    microbatch: int


@dataclass(frozen=True)
class Case:
    """One model, machine and way of training, for microbatches of any size and length.

    ``batch_size``: sequences of a step.
    """

    profile: Profile
    machine: Machine
    job: Job
    batch_size: int

    def at(self, *, size: int, length: int | None = None) -> Costs:
        """Costs of the first card for microbatches of ``size`` sequences."""
        return costs(self.profile, self.machine.cards[0], self._job(size, length))

    def speeds(self, *, size: int) -> tuple[float, ...] | None:
        """Of the devices, relative to the first; None: all alike. Raises ConfigError."""
        cards = self.machine.cards
        if all(card == cards[0] for card in cards):
            return None
        work = [_work(costs(self.profile, card, self._job(size, None))) for card in cards]
        return tuple(work[0] / each for each in work)

    def _job(self, size: int, length: int | None) -> Job:
        wanted = self.job.length if length is None else length
        return replace(self.job, microbatch_size=size, length=wanted)

    @property
    def device_limit(self) -> int:
        """Bytes of the smallest device."""
        return min(card.memory_bytes for card in self.machine.cards)

    def microbatches(self, size: int) -> int:
        """How many a step has."""
        return -(-self.batch_size // size)

    def least_device(self, *, size: int, length: int | None = None, batch: int = 0) -> DeviceNeed:
        """What a device needs at least: every layer as a stage of its own, dealt in turn.

        ``batch``: sequences of a step if not the case's own.
        """
        of = self.at(size=size, length=length)
        devices = self.machine.num_devices
        held = min(-(-(batch or self.batch_size) // size), FEW_EACH * devices)
        return device_need(of, Candidate(single_layers(of)), devices=devices, microbatches=held)

    def least_host(self, *, size: int, length: int | None = None, batch: int = 0) -> HostBytes:
        """What the host needs at least: each stage once a step, as few saved inputs as can be.

        ``batch``: sequences of a step if not the case's own.
        """
        of = self.at(size=size, length=length)
        held = -(-(batch or self.batch_size) // size)
        return host_bytes(of, _once(few_stages(of, self.device_limit), range(held)))

    def host_total(self, need: HostBytes, device: DeviceNeed) -> int:
        """Host memory in all: what CPU devices hold is host memory too, and what none ever do."""
        in_host = sum(card.in_host for card in self.machine.cards)
        return need.total + in_host * device.total + self.profile.unread_bytes

    def sizes(self) -> list[int]:
        """Powers of two that fit the devices, up to the batch; none where nothing fits."""
        found, size = [], 1
        while size <= self.batch_size:
            if self.least_device(size=size).total > self.device_limit:
                break
            found.append(size)
            size *= 2
        return found

    def longest(self, *, batch: int = 0) -> int:
        """The most tokens of a sequence that fit, one a microbatch; 0: none do.

        ``batch``: sequences of a step, if not one a device. Where host memory does not even hold
        the weights, only devices count.
        """
        batch = batch or self.machine.num_devices
        is_hopeless = not self._host_holds(1, batch)

        def is_too_long(length: int) -> bool:
            device = self.least_device(size=1, length=length, batch=batch)
            if device.total > self.device_limit:
                return True
            return not is_hopeless and not self._host_holds(length, batch)

        return bisect_right(range(1, _LONGEST + 1), x=False, key=is_too_long)

    def _host_holds(self, length: int, batch: int) -> bool:
        """Whether the host holds a step of microbatches of one sequence."""
        device = self.least_device(size=1, length=length, batch=batch)
        host = self.least_host(size=1, length=length, batch=batch)
        return self.host_total(host, device) <= self.machine.host.memory_bytes

    def disk(self, kept: int | None, *, only_model: bool = False) -> tuple[int, Disk]:
        """Bytes in all with so many checkpoints beside one in the making, and what they are.

        None: of checkpoints without end none is counted. ``only_model``: those that are kept are
        model files alone.
        """
        found = disk(self.profile, self.job, save_total_limit=kept)
        if kept is None:
            return found.download + found.result, found
        state = found.checkpoint - found.result
        return found.total - (kept * state if only_model else 0), found


def single_layers(of: Costs) -> Partition:
    """Every layer as a stage of its own."""
    last = of.num_layers - 1
    lowest = last if of.first_trainable is None else of.first_trainable
    below = tuple(range(layer, layer + 1) for layer in range(last))
    return Partition(below, range(last, last + 1), below[lowest:][::-1])


def few_stages(of: Costs, limit: int) -> Partition:
    """Backward stages as large as the device holds beside the others: the fewest saved inputs."""
    single = single_layers(of)
    try:
        shares = shares_of(of, limit, 1)
    except PlanError:  # not even single layers fit
        return single
    backward: list[range] = []
    for stage in single.backward:
        joined = range(stage.start, backward[-1].stop) if backward else stage
        if backward and shares.holds(joined, Phase.BACKWARD):
            backward[-1] = joined
        else:
            backward.append(stage)
    return Partition(single.forward, single.fused, tuple(backward))


def device_need(of: Costs, candidate: Candidate, *, devices: int, microbatches: int) -> DeviceNeed:
    """What the device holds that holds most, and the largest stage that it runs."""
    visits = candidate.visits(of, devices=devices, microbatches=microbatches)
    turn = candidate.turn(visits, devices=devices)
    total = schedule_bytes(of, visits, devices=devices, turn=turn)
    stages = {(visit.layers, visit.phase) for visit in visits}

    def size(stage: tuple[range, Phase]) -> int:
        return slot_bytes(of, *stage) + microbatch_bytes(of, *stage)

    worst = max(stages, key=lambda stage: (size(stage), stage[0].start))
    return DeviceNeed(total, worst[0], slot_bytes(of, *worst), microbatch_bytes(of, *worst))


def _once(partition: Partition, microbatches: range) -> Sequence[Visit]:
    """Each stage with backward once, by one device: what least memory takes."""
    stages = [(partition.fused, Phase.FUSED), *((s, Phase.BACKWARD) for s in partition.backward)]
    return [
        Visit(number, number, phase, layers, 0, tuple(microbatches))
        for number, (layers, phase) in enumerate(stages)
    ]


def _work(of: Costs) -> float:
    return sum(2 * layer.forward_seconds + layer.backward_seconds for layer in of.layers)
