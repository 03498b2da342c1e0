"""Weight-bound schedules, to compare with: a stage lives on one device and weights never move.

Stage s lives on device s mod N, in every step. A device need not finish a visit before it computes
the next, so it may interleave: 1F1B on 2 devices, 3 microbatches, the upper stage fused::

    0.compute  F0.0 F0.1           R2.0 B2.0 F0.2 R2.1 B2.1 R2.2 B2.2
    1.compute       X1.0 X1.1                     X1.2

What interleaves is simulated only. ``gpipe`` does not, so it lowers and runs as round-robin does.
With ``fused=False`` the last stage runs forward and backward apart, as these schedules were first
described; that too is simulated only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.generators import computation, saves_of
from roundpipe.plan.schedule import Phase, Schedule, Visit, stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.costs import Costs

Turn = tuple[bool, int, int]  # whether backward, stage, microbatch


@dataclass(frozen=True)
class Bound:
    """Stages bottom up, the head in the last, and the devices they live on."""

    stages: Sequence[range]
    costs: Costs
    devices: int
    microbatches: int
    fused: bool

    def __post_init__(self) -> None:
        covered = [layer for stage in self.stages for layer in stage]
        if not all(self.stages) or covered != list(range(self.costs.num_layers)):
            raise PlanError(
                f"stages must cover layers 0 to {self.costs.num_layers - 1}, none empty: "
                f"{list(self.stages)}"
            )
        lowest = self.costs.first_trainable
        if not self.fused and (lowest is None or lowest >= self.stages[-1].stop):
            raise PlanError("nothing is trained, so no stage runs backward\nhint: fused=True")

    def on(self, device: int) -> range:
        """The stages of a device."""
        return range(device, len(self.stages), self.devices)


def gpipe(
    stages: Sequence[range],
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    fused: bool = True,
) -> Schedule:
    """Run each stage forward on all microbatches, then each backward on all of them."""
    bound = Bound(stages, costs, devices, microbatches, fused)
    return _schedule(bound, [_breadth_first(bound, device) for device in range(devices)])


def looped_bfs(
    stages: Sequence[range],
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    fused: bool = True,
) -> Schedule:
    """Several stages a device, breadth first (Lamy-Poirier, "Breadth-First Pipeline Parallelism").

    As ``gpipe``; but where the last stage is not fused, backward begins with the microbatch whose
    forward came last.
    """
    bound = Bound(stages, costs, devices, microbatches, fused)
    orders = [_breadth_first(bound, device, is_reversed=not fused) for device in range(devices)]
    return _schedule(bound, orders)


def one_f_one_b(
    stages: Sequence[range],
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    fused: bool = True,
) -> Schedule:
    """One stage a device; after a warm-up each device runs a forward and a backward in turn.

    A device begins with as many forwards as there are stages above its own. Raises PlanError if
    there are more stages than devices.
    """
    bound = Bound(stages, costs, devices, microbatches, fused)
    if len(stages) > devices:
        raise PlanError(
            f"1F1B has one stage a device: {len(stages)} stages on {devices}\n"
            "hint: schedule=interleaved"
        )
    orders = []
    for stage in range(len(stages)):
        forward = [(False, stage, microbatch) for microbatch in range(microbatches)]
        backward = [(True, stage, microbatch) for microbatch in range(microbatches)]
        orders.append(_in_turn(forward, backward, warm_up=len(stages) - 1 - stage))
    return _schedule(bound, orders)


def interleaved(
    stages: Sequence[range],
    costs: Costs,
    *,
    devices: int,
    microbatches: int,
    fused: bool = True,
) -> Schedule:
    """1F1B with several stages a device (Narayanan et al., "Efficient Large-Scale Training").

    Microbatches go in groups of as many as there are devices; a device takes a group through all
    its stages before it takes the next. Raises PlanError unless each device has as many stages.
    """
    bound = Bound(stages, costs, devices, microbatches, fused)
    if len(stages) % devices:
        raise PlanError(
            f"interleaved 1F1B has as many stages on each device: {len(stages)} stages on "
            f"{devices}\nhint: cut into {-(-len(stages) // devices) * devices} stages"
        )
    groups = [
        range(first, min(first + devices, microbatches))
        for first in range(0, microbatches, devices)
    ]
    orders = []
    for device in range(devices):
        own = bound.on(device)
        forward = [(False, stage, m) for group in groups for stage in own for m in group]
        backward = [(True, stage, m) for group in groups for stage in own[::-1] for m in group]
        warm_up = 2 * (devices - 1 - device) + (len(own) - 1) * devices
        orders.append(_in_turn(forward, backward, warm_up=warm_up))
    return _schedule(bound, orders)


def with_waiting_recompute(schedule: Schedule) -> Schedule:
    """The same computation, but no recompute starts before the gradient it is for has arrived."""
    waits = dict(schedule.waits)
    for visit in schedule.visits:
        if visit.phase is Phase.BACKWARD:
            for microbatch in visit.microbatches:
                recompute, backward = visit.compute(microbatch)
                both = (*waits[recompute], *waits[backward])
                waits[recompute] = tuple(dict.fromkeys(both))
    return replace(schedule, waits=waits)


def _breadth_first(bound: Bound, device: int, *, is_reversed: bool = False) -> list[Turn]:
    own, microbatches = bound.on(device), range(bound.microbatches)
    back = microbatches[::-1] if is_reversed else microbatches
    return [
        *((False, stage, microbatch) for stage in own for microbatch in microbatches),
        *((True, stage, microbatch) for stage in own[::-1] for microbatch in back),
    ]


def _in_turn(forward: list[Turn], backward: list[Turn], *, warm_up: int) -> list[Turn]:
    """Some forwards first, then one of each in turn, then the backwards that are left."""
    turns = forward[:warm_up]
    rest = forward[warm_up:]
    for one, other in zip(rest, backward, strict=False):
        turns += (one, other)
    return turns + backward[len(rest) :]


def _schedule(bound: Bound, orders: Sequence[Sequence[Turn]]) -> Schedule:
    """The stages' visits, each device computing in its order."""
    visits = _visits(bound)
    by_turn = {(visit.has_backward, visit.stage): visit for visit in visits}
    base = computation(
        visits,
        devices=bound.devices,
        microbatches=bound.microbatches,
        deals_on=False,
        splits_loss=not bound.fused,
    )
    streams = dict(base.streams)
    last = len(bound.stages) - 1
    for device, order in enumerate(orders):
        queue: list[Action] = []
        for is_backward, stage, microbatch in order:
            if bound.fused and stage == last:  # takes its forward's place; nothing is left to do
                if is_backward:
                    continue
                is_backward = True  # noqa: PLW2901
            visit = by_turn.get((is_backward, stage))
            if visit is not None:  # nothing goes backward where nothing is trained
                queue += visit.compute(microbatch)
        streams[stream(device, "compute")] = tuple(queue)
    return replace(base, streams=streams)


def _visits(bound: Bound) -> list[Visit]:
    """One visit forward and one backward of each stage; of the last only one if it is fused."""
    lowest = bound.costs.first_trainable
    every = tuple(range(bound.microbatches))
    phases = [(stage, Phase.FORWARD) for stage in range(len(bound.stages))]
    if bound.fused:
        phases[-1] = (len(bound.stages) - 1, Phase.FUSED)
    for stage in reversed(range(len(bound.stages) - bound.fused)):
        if lowest is not None and lowest < bound.stages[stage].stop:
            phases.append((stage, Phase.BACKWARD))
    layers = {}
    for stage, phase in phases:
        start, stop = bound.stages[stage].start, bound.stages[stage].stop
        is_cut = phase is Phase.BACKWARD and lowest is not None
        layers[stage, phase] = range(max(start, lowest or 0) if is_cut else start, stop)
    starts = {cut.start for (_, phase), cut in layers.items() if phase is not Phase.FORWARD}
    return [
        Visit(
            number=number,
            stage=stage,
            phase=phase,
            layers=layers[stage, phase],
            device=stage % bound.devices,
            microbatches=every,
            saves=saves_of(phase, layers[stage, phase], starts),
            gives_gradient=lowest is not None and lowest < layers[stage, phase].start,
        )
        for number, (stage, phase) in enumerate(phases)
    ]
