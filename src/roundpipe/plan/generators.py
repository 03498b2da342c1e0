"""Generators: which visit runs what, where. They give computation only; passes add the rest.

Round-robin over 2 devices, 3 stages, 3 microbatches, then the next step without a flush::

    0.compute  F0.0 F0.1 F0.2                R2.0 B2.0 R2.1 B2.1 R2.2 B2.2 | (next step: X on 0)
    1.compute       X1.0 X1.1 X1.2                                         | F0.0 F0.1 ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.deal import InTurn, Stage, ToEarliest, shares
from roundpipe.plan.schedule import Phase, Schedule, Visit, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.partition import Partition


DealName = Literal["cyclic", "earliest", "levelled"]


@dataclass(frozen=True)
class Replicas:
    """On how many devices at once a stage of each kind runs, each on its share of microbatches.

    The first ``ramp_stages`` forward stages of a step and its last so many backward stages run on
    ``ramp`` devices instead: where devices wait for their first work, or have had their last.
    """

    forward: int = 1
    fused: int = 1
    backward: int = 1
    ramp: int = 1
    ramp_stages: int = 0

    def of(self, phase: Phase, from_end: int) -> int:
        """For a stage that is so many stages from its end of the step."""
        if phase is not Phase.FUSED and from_end < self.ramp_stages:
            return self.ramp
        kinds = {
            Phase.FORWARD: self.forward,
            Phase.FUSED: self.fused,
            Phase.BACKWARD: self.backward,
        }
        return kinds[phase]


def rounds_of(num_microbatches: int, rounds: int) -> list[tuple[int, ...]]:
    """Microbatches of each round, as even as can be, in order."""
    if not 1 <= rounds <= max(num_microbatches, 1):
        raise PlanError(f"rounds must be between 1 and the number of microbatches: {rounds}")
    return shares(range(num_microbatches), rounds)


def round_robin(  # noqa: PLR0913 - each of them is a word of the subject
    partition: Partition,
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    rounds: int = 1,
    start_device: int = 0,
    replicas: Replicas = Replicas(),
    deal: DealName = "cyclic",
    speeds: Sequence[float] | None = None,
) -> Schedule:
    """Deal each stage of each round to the next device, which runs all its microbatches.

    With ``replicas`` a stage goes to several devices in turn, each with its share of microbatches.
    ``deal="earliest"`` and ``"levelled"`` give it to those that will be free first (see
    ``roundpipe.plan.deal``) and begin each step alike. ``speeds`` are the devices' relative speeds,
    equal if not given: devices of unequal speed begin each step alike, and each round too if dealt
    in turn.
    """
    speeds = [1.0] * devices if speeds is None else speeds
    visits = deal_visits(
        partition,
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=rounds,
        start_device=start_device,
        replicas=replicas,
        deal=deal,
        speeds=speeds,
    )
    return computation(
        visits,
        devices=devices,
        microbatches=microbatches,
        start_device=start_device,
        deals_on=deals_on(deal, speeds),
    )


def deals_on(deal: DealName, speeds: Sequence[float]) -> bool:
    """Whether the next step begins where this one ended."""
    return deal == "cyclic" and min(speeds) == max(speeds)


def deal_visits(  # noqa: PLR0913 - as ``round_robin``
    partition: Partition,
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    rounds: int = 1,
    start_device: int = 0,
    replicas: Replicas = Replicas(),
    deal: DealName = "cyclic",
    speeds: Sequence[float] | None = None,
) -> list[Visit]:
    """The visits of ``round_robin`` alone, in the order of the deal."""
    speeds = [1.0] * devices if speeds is None else speeds
    if len(speeds) != devices:
        raise PlanError(f"speeds must be one a device, of {devices}: {tuple(speeds)}")
    are_alike = min(speeds) == max(speeds)
    dealer: InTurn | ToEarliest = InTurn(devices, start_device)
    if deal != "cyclic":
        dealer = ToEarliest(costs, speeds, start_device, is_levelled=deal == "levelled")
    lowest = costs.first_trainable
    stages = _stages(partition)
    visits: list[Visit] = []
    groups = rounds_of(microbatches, rounds)
    for at, group in enumerate(groups):
        if isinstance(dealer, InTurn) and not are_alike:
            dealer.next_device = start_device
        for number, stage in enumerate(stages):
            is_ramp = at == (0 if stage.phase is Phase.FORWARD else len(groups) - 1)
            from_end = number if stage.phase is Phase.FORWARD else len(stages) - 1 - number
            copies = replicas.of(stage.phase, from_end if is_ramp else len(stages))
            for device, share in dealer.deal(stage, group, copies):
                visits.append(
                    Visit(
                        number=len(visits),
                        stage=number,
                        phase=stage.phase,
                        layers=stage.layers,
                        device=device,
                        microbatches=share,
                        saves=stage.saves,
                        gives_gradient=lowest is not None and lowest < stage.layers.start,
                    )
                )
    return visits


def replicated(
    partition: Partition, costs: Costs, *, devices: int, microbatches: int, rounds: int = 1
) -> Schedule:
    """Run each stage on all devices at once, each on its share of the microbatches."""
    return round_robin(
        partition,
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=rounds,
        replicas=Replicas(devices, devices, devices),
    )


def _stages(partition: Partition) -> list[Stage]:
    """The stages of one round in the order in which they run."""
    starts = {partition.fused.start, *(layers.start for layers in partition.backward)}
    phases = [
        *((Phase.FORWARD, layers) for layers in partition.forward),
        (Phase.FUSED, partition.fused),
        *((Phase.BACKWARD, layers) for layers in partition.backward),
    ]
    return [Stage(phase, layers, saves_of(phase, layers, starts)) for phase, layers in phases]


def forward_only(
    stages: Sequence[range],
    *,
    devices: int,
    microbatches: int,
    start_device: int = 0,
    saved: Iterable[int] = (),
    recomputed: int | None = None,
) -> Schedule:
    """A pass without gradient, dealt round-robin; the last visit's outputs are the result.

    So are the boundaries in ``saved``: the inputs of the stages of a later ``backward_only``, which
    recomputes the layers from ``recomputed`` on; None: nothing does.
    """
    starts, top = set(saved), stages[-1].stop
    visits = []
    for number, layers in enumerate(stages):
        saves = saves_of(Phase.FORWARD, layers, starts)
        visits.append(
            Visit(
                number=number,
                stage=number,
                phase=Phase.FORWARD,
                layers=layers,
                device=(start_device + number) % devices,
                microbatches=tuple(range(microbatches)),
                saves=saves,
                results=tuple(to for to in saves if to in starts or to == top),
            )
        )
    made = computation(
        visits, devices=devices, microbatches=microbatches, start_device=start_device
    )
    return made if recomputed is None else replace(made, keeps=keeps_of(visits, recomputed))


def backward_only(
    stages: Sequence[range],
    *,
    devices: int,
    microbatches: int,
    start_device: int = 0,
    to_inputs: bool = False,
) -> Schedule:
    """The backward of a pass that ``forward_only`` ran before, dealt round-robin.

    ``stages`` from the top down, the first of which ends with the last layer. ``to_inputs``:
    whether the lowest gives the gradient of what it reads too.
    """
    visits = [
        Visit(
            number=number,
            stage=number,
            phase=Phase.BACKWARD,
            layers=layers,
            device=(start_device + number) % devices,
            microbatches=tuple(range(microbatches)),
            gives_gradient=to_inputs or layers != stages[-1],
        )
        for number, layers in enumerate(stages)
    ]
    return computation(
        visits,
        devices=devices,
        microbatches=microbatches,
        start_device=start_device,
    )


def keeps_of(visits: Sequence[Visit], recomputed: int) -> dict[int, range]:
    """Of each forward visit the layers that are recomputed, if ``recomputed`` is the lowest."""
    return {
        visit.number: range(max(visit.layers.start, recomputed), visit.layers.stop)
        for visit in visits
        if visit.phase is Phase.FORWARD and visit.layers.stop > recomputed
    }


def saves_of(phase: Phase, layers: range, starts: set[int]) -> tuple[int, ...]:
    """What a visit hands out: ``starts`` are where stages begin that have a backward."""
    if phase is not Phase.FORWARD:
        return ()
    inside = {start for start in starts if layers.start < start < layers.stop}
    return tuple(sorted(inside | {layers.stop}))


def computation(
    visits: Sequence[Visit],
    *,
    devices: int,
    microbatches: int,
    start_device: int = 0,
    deals_on: bool = True,
    splits_loss: bool = False,
) -> Schedule:
    """The schedule that runs ``visits`` in order on their devices, with data dependencies only.

    ``splits_loss``: no visit is fused; the forward of the last layer makes the loss, with which its
    backward begins. Where all visits are backward the caller gives what nothing here makes. Raises
    PlanError for a visit that needs what none before it hands out, or is on no device there is.
    """
    for visit in visits:
        _require_possible(visit, devices, microbatches)
    backward = [visit.layers.start for visit in visits if visit.phase is Phase.BACKWARD]
    is_continued = bool(visits) and len(backward) == len(visits)
    top = max((visit.layers.stop for visit in visits), default=0)
    streams: dict[str, list[Action]] = {stream(device, "compute"): [] for device in range(devices)}
    waits: dict[Action, tuple[Action, ...]] = {}
    made: dict[tuple[int, int], Action] = {}  # (boundary, microbatch) -> what computed it
    gradients: dict[tuple[int, int], Action] = {}
    for visit in visits:
        queue = streams[stream(visit.device, "compute")]
        for microbatch in visit.microbatches:
            for action in visit.compute(microbatch):
                needs = _needs(visit, action, made, gradients, is_continued=is_continued)
                waits[action] = tuple(needs)
                queue.append(action)
            for boundary in visit.saves:
                made[boundary, microbatch] = visit.compute(microbatch)[-1]
            if visit.has_backward and visit.gives_gradient:
                gradients[visit.layers.start, microbatch] = visit.compute(microbatch)[-1]
            elif splits_loss and visit.layers.stop == top:
                gradients[top, microbatch] = visit.compute(microbatch)[-1]
    return Schedule(
        visits=tuple(visits),
        streams={name: tuple(queue) for name, queue in streams.items()},
        waits=waits,
        num_devices=devices,
        num_microbatches=microbatches,
        start_device=start_device,
        deals_on=deals_on,
        is_continued=is_continued,
        keeps=keeps_of(visits, min(backward)) if backward else {},
    )


def _require_possible(visit: Visit, devices: int, microbatches: int) -> None:
    """What a visit that is made by hand can get wrong by itself."""
    above = range(visit.layers.start + 1, visit.layers.stop + 1)
    wrong = [boundary for boundary in visit.saves if boundary not in above]
    if visit.device not in range(devices):
        raise PlanError(f"visit {visit.number} is on device {visit.device}: there are {devices}")
    if not set(visit.microbatches) <= set(range(microbatches)):
        raise PlanError(
            f"visit {visit.number} has microbatches {visit.microbatches}: there are {microbatches}"
        )
    if wrong:
        raise PlanError(
            f"visit {visit.number} of layers {list(visit.layers)} saves boundary {wrong[0]}: "
            "it hands out what the layers above its first one read"
        )


def _needs(
    visit: Visit,
    action: Action,
    made: dict[tuple[int, int], Action],
    gradients: dict[tuple[int, int], Action],
    *,
    is_continued: bool,
) -> Iterator[Action]:
    """What one compute action needs the result of; a boundary nobody makes is a PlanError."""
    assert action.microbatch is not None
    if action.op is Op.BACKWARD:
        found = gradients.get((visit.layers.stop, action.microbatch))
        if found is None and is_continued:
            return
        if found is None:
            raise PlanError(
                f"{action} needs a gradient of boundary {visit.layers.stop} that nothing makes"
            )
        yield found
    elif visit.layers.start > 0 and not is_continued:
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
