"""Generators: which visit runs what, where. They give computation only; passes add the rest.

Round-robin over 2 devices, 3 stages, 3 microbatches, then the next step without a flush::

    0.compute  F0.0 F0.1 F0.2                R2.0 B2.0 R2.1 B2.1 R2.2 B2.2 | (next step: X on 0)
    1.compute       X1.0 X1.1 X1.2                                         | F0.0 F0.1 ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.schedule import Phase, Schedule, Visit, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.partition import Partition


@dataclass(frozen=True)
class Replicas:
    """On how many devices at once a stage of each kind runs, each on its share of microbatches."""

    forward: int = 1
    fused: int = 1
    backward: int = 1


def rounds_of(num_microbatches: int, rounds: int) -> list[tuple[int, ...]]:
    """Microbatches of each round, as even as can be, in order."""
    if not 1 <= rounds <= max(num_microbatches, 1):
        raise PlanError(f"rounds must be between 1 and the number of microbatches: {rounds}")
    return shares(range(num_microbatches), rounds)


def shares(items: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut ``items`` into at most ``count`` even runs (the first ones longer), none empty."""
    count = min(count, len(items))
    out, at = [], 0
    for share in range(count):
        size = len(items) // count + (share < len(items) % count)
        out.append(tuple(items[at : at + size]))
        at += size
    return out


def round_robin(  # noqa: PLR0913 - each of them is a word of the subject
    partition: Partition,
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    rounds: int = 1,
    start_device: int = 0,
    replicas: Replicas = Replicas(),
) -> Schedule:
    """Deal each stage of each round to the next device, which runs all its microbatches.

    With ``replicas`` a stage goes to several devices in turn, each with its share of microbatches.
    """
    lowest = costs.first_trainable
    visits: list[Visit] = []
    stages: list[tuple[Phase, range, int]] = [
        *((Phase.FORWARD, layers, replicas.forward) for layers in partition.forward),
        (Phase.FUSED, partition.fused, replicas.fused),
        *((Phase.BACKWARD, layers, replicas.backward) for layers in partition.backward),
    ]
    starts = {partition.fused.start, *(layers.start for layers in partition.backward)}
    for group in rounds_of(microbatches, rounds):
        for stage, (phase, layers, copies) in enumerate(stages):
            for share in shares(group, min(copies, devices)):
                visits.append(
                    Visit(
                        number=len(visits),
                        stage=stage,
                        phase=phase,
                        layers=layers,
                        device=(start_device + len(visits)) % devices,
                        microbatches=share,
                        saves=_saves(phase, layers, starts),
                        gives_gradient=lowest is not None and lowest < layers.start,
                    )
                )
    return computation(
        visits, devices=devices, microbatches=microbatches, start_device=start_device
    )


def forward_only(
    stages: Sequence[range], *, devices: int, microbatches: int, start_device: int = 0
) -> Schedule:
    """A pass without gradient, dealt round-robin; the last visit's outputs are the result."""
    visits = [
        Visit(
            number=number,
            stage=number,
            phase=Phase.FORWARD,
            layers=layers,
            device=(start_device + number) % devices,
            microbatches=tuple(range(microbatches)),
            saves=(layers.stop,),
        )
        for number, layers in enumerate(stages)
    ]
    return computation(
        visits, devices=devices, microbatches=microbatches, start_device=start_device
    )


def _saves(phase: Phase, layers: range, starts: set[int]) -> tuple[int, ...]:
    if phase is not Phase.FORWARD:
        return ()
    inside = {start for start in starts if layers.start < start < layers.stop}
    return tuple(sorted(inside | {layers.stop}))


def computation(
    visits: Sequence[Visit], *, devices: int, microbatches: int, start_device: int = 0
) -> Schedule:
    """The schedule that runs ``visits`` in order on their devices, with data dependencies only."""
    streams: dict[str, list[Action]] = {stream(device, "compute"): [] for device in range(devices)}
    waits: dict[Action, tuple[Action, ...]] = {}
    made: dict[tuple[int, int], Action] = {}  # (boundary, microbatch) -> what computed it
    gradients: dict[tuple[int, int], Action] = {}
    for visit in visits:
        queue = streams[stream(visit.device, "compute")]
        for microbatch in visit.microbatches:
            for action in visit.compute(microbatch):
                waits[action] = tuple(_needs(visit, action, made, gradients))
                queue.append(action)
            for boundary in visit.saves:
                made[boundary, microbatch] = visit.compute(microbatch)[-1]
            if visit.has_backward:
                gradients[visit.layers.start, microbatch] = visit.compute(microbatch)[-1]
    return Schedule(
        visits=tuple(visits),
        streams={name: tuple(queue) for name, queue in streams.items()},
        waits=waits,
        num_devices=devices,
        num_microbatches=microbatches,
        start_device=start_device,
    )


def _needs(
    visit: Visit,
    action: Action,
    made: dict[tuple[int, int], Action],
    gradients: dict[tuple[int, int], Action],
) -> Iterator[Action]:
    """What one compute action needs the result of; a boundary nobody makes is a PlanError."""
    assert action.microbatch is not None
    if action.op is Op.BACKWARD:
        found = gradients.get((visit.layers.stop, action.microbatch))
        if found is None:
            raise PlanError(
                f"{action} needs a gradient of boundary {visit.layers.stop} that nothing makes"
            )
        yield found
    elif visit.layers.start > 0:
        found = made.get((visit.layers.start, action.microbatch))
        if found is None:
            raise PlanError(
                f"{action} needs boundary {visit.layers.start}, which nothing hands out"
            )
        yield found


def at_start_device(schedule: Schedule, start_device: int) -> Schedule:
    """The same schedule dealt from another device on, lowered or not: devices change names alone.

    No rule knows one device from another, so what `check` accepts it accepts under any names.
    """
    count = schedule.num_devices
    turn = (start_device - schedule.start_device) % count

    def renamed(name: str) -> str:
        device, _, kind = name.rpartition(".")
        return stream((int(device) + turn) % count, kind) if device else name

    place = {name: at for at, name in enumerate(schedule.streams)}
    streams = {renamed(name): queue for name, queue in schedule.streams.items()}
    return replace(
        schedule,
        visits=tuple(
            replace(visit, device=(visit.device + turn) % count) for visit in schedule.visits
        ),
        streams={name: streams[name] for name in sorted(streams, key=lambda n: place.get(n, 0))},
        start_device=start_device,
    )
