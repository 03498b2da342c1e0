"""Stages that are given, not chosen: plans written by hand, balanced ones, schedules of one's own.

`balanced` cuts one or several chains at one limit on the time of a stage, so that stages of all of
them take about equally long and can be dealt in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from roundpipe.errors import ConfigError, PlanError
from roundpipe.plan.memory import slot_bytes
from roundpipe.plan.partition import Partition
from roundpipe.plan.schedule import Phase, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.config import ModelExecutePlan
    from roundpipe.plan.costs import Costs

RunType = Literal["infer", "train", "fused"]
Stages = tuple[list[range], list[range]]  # forward bottom up, backward top down
_ROUNDING = 1 + 1e-9


def partition_of(by_hand: ModelExecutePlan, costs: Costs) -> Partition:
    """A plan given by hand as a checked partition.

    Raises ConfigError without a backward stage, PlanError if it misses a layer.
    """
    if not by_hand.bwd_plan:
        raise ConfigError(
            "an execute plan has no backward stage\n"
            "hint: bwd_plan begins with the fused stage, e.g. [range(9, 10), range(0, 9)]"
        )
    lowest = costs.first_trainable
    below = [  # what is frozen to the bottom needs no backward, whatever the plan says
        range(max(stage.start, lowest), stage.stop)
        for stage in by_hand.bwd_plan[1:]
        if lowest is not None and stage.stop > lowest
    ]
    partition = Partition(tuple(by_hand.fwd_plan), by_hand.bwd_plan[0], tuple(below))
    require_whole(partition, costs)
    return partition


def backward_part(by_hand: ModelExecutePlan) -> ModelExecutePlan:
    """A plan for a forward and its backward as one for both at once: what backward is cut from.

    Forward stages go up to the last layer there, so they are cut where the first backward stage
    begins.
    """
    top = by_hand.bwd_plan[0].start if by_hand.bwd_plan else 0
    below = [range(s.start, min(s.stop, top)) for s in by_hand.fwd_plan if s.start < top]
    return replace(by_hand, fwd_plan=below)


def require_computation(made: object, *, devices: int, microbatches: int) -> None:
    """Raise ConfigError or PlanError unless a schedule of somebody's own says what devices do."""
    if not isinstance(made, Schedule):
        raise ConfigError(f"schedule= must return a roundpipe.plan.Schedule: {type(made).__name__}")
    wanted = {"devices": devices, "microbatches": microbatches}
    found = {"devices": made.num_devices, "microbatches": made.num_microbatches}
    if made.is_lowered or found != wanted:
        what = "transfers" if made.is_lowered else f"{found}, not {wanted}"
        raise PlanError(
            f"schedule= must return what devices compute, and no more: {what}\n"
            "hint: return what the generators of roundpipe.plan return"
        )


def require_whole(partition: Partition, costs: Costs) -> None:
    """Raise PlanError if stages leave out the last layer, or one that is trained."""
    lowest = costs.first_trainable
    if list(partition.fused) != list(range(partition.fused.start, costs.num_layers)):
        raise PlanError(
            f"the fused stage must end with the last of {costs.num_layers} layers: "
            f"{partition.fused}"
        )
    reached = min(stage.start for stage in (partition.fused, *partition.backward))
    if lowest is not None and lowest < reached:
        raise PlanError(
            f"backward stages must reach down to the lowest trained layer, {lowest}: "
            f"{list(partition.backward)}"
        )


def forward_of(by_hand: ModelExecutePlan, costs: Costs) -> tuple[range, ...]:
    """The stages of a pass without gradient: those forward, with the fused one where they end.

    Raises PlanError if they do not cover every layer once.
    """
    stages = list(by_hand.fwd_plan)
    covered = sum(len(stage) for stage in stages)
    if covered < costs.num_layers and by_hand.bwd_plan:
        stages.append(by_hand.bwd_plan[0])
    if [layer for stage in stages for layer in stage] != list(range(costs.num_layers)):
        raise PlanError(
            f"forward stages must cover layers 0 to {costs.num_layers}, each once: {stages}"
        )
    return tuple(stages)


def backward_of(partition: Partition, below: Sequence[range], costs: Costs) -> tuple[range, ...]:
    """The stages of a backward whose forward is a pass of its own, from the top down.

    ``below``: forward stages, where it goes on to the first layer though nothing so low is trained.
    """
    stages = [partition.fused, *partition.backward]
    lowest = stages[-1].start
    stages += [range(s.start, min(s.stop, lowest)) for s in reversed(below) if s.start < lowest]
    if not below and costs.first_trainable is not None:
        stages[0] = range(max(stages[0].start, costs.first_trainable), stages[0].stop)
    return tuple(stages)


def partition_in(computation: Schedule) -> Partition:
    """The stages that the first microbatch goes through; raises PlanError if none is fused."""
    visits = [visit for visit in computation.visits if 0 in visit.microbatches]
    fused = [visit.layers for visit in visits if visit.phase is Phase.FUSED]
    if len(fused) != 1:
        raise PlanError(f"a schedule fuses the last layers, once a microbatch: {fused or 'none'}")
    return Partition(
        tuple(visit.layers for visit in visits if visit.phase is Phase.FORWARD),
        fused[0],
        tuple(visit.layers for visit in visits if visit.phase is Phase.BACKWARD),
    )


def balanced(
    chains: Sequence[Costs],
    run_type: RunType,
    *,
    min_stages: int,
    upper_threshold: float = 1.1,
    stage_bytes: int | None = None,
) -> list[Stages]:
    """Stages for each chain, all about equally long, at least ``min_stages`` where layers allow it.

    ``infer``: forward alone. ``train``: forward and backward, each over all layers. ``fused``: the
    first backward stage runs forward too, and forward stages end below it. No stage takes longer
    than ``upper_threshold`` times the slowest layer, nor weights and gradients of more than
    ``stage_bytes``; of what that leaves, the fewest stages, cut as short as so many can be.
    """
    cutters = [_Cutter(costs, run_type, stage_bytes) for costs in chains]
    slowest = max(cutter.slowest for cutter in cutters)
    limits = {slowest, slowest * upper_threshold}
    for cutter in cutters:
        limits.update(t for t in cutter.times() if slowest < t <= slowest * upper_threshold)
    counts = {limit: sum(cutter.count(limit) for cutter in cutters) for limit in sorted(limits)}
    enough = [count for count in counts.values() if count >= min_stages]
    wanted = min(enough) if enough else max(counts.values())
    limit = next(limit for limit, count in counts.items() if count == wanted)
    return [cutter.cut(limit) for cutter in cutters]


@dataclass(frozen=True)
class _Cutter:
    """Fills the stages of one chain as far as a limit allows."""

    costs: Costs
    run_type: RunType
    stage_bytes: int | None

    @property
    def slowest(self) -> float:
        """Seconds of the slowest layer, in what it does of this run."""
        phase = Phase.FORWARD if self.run_type == "infer" else Phase.BACKWARD
        return max(self.seconds(range(at, at + 1), phase) for at in range(self.costs.num_layers))

    def seconds(self, layers: range, phase: Phase) -> float:
        """Of a stage; what runs backward has run forward first."""
        held = self.costs.layers[layers.start : layers.stop]
        seconds = sum(cost.forward_seconds for cost in held)
        if phase is not Phase.FORWARD:
            seconds += sum(cost.backward_seconds for cost in held)
        return seconds

    def times(self) -> Iterator[float]:
        """Of every stage there could be."""
        num = self.costs.num_layers
        for start in range(num):
            for stop in range(start + 1, num + 1):
                yield self.seconds(range(start, stop), Phase.FORWARD)
                if self.run_type != "infer":
                    yield self.seconds(range(start, stop), Phase.BACKWARD)

    def count(self, limit: float) -> int:
        """How many stages a limit gives."""
        forward, backward = self.cut(limit)
        return len(forward) + len(backward)

    def cut(self, limit: float) -> Stages:
        """The stages, none longer than a limit if one layer is not."""
        num = self.costs.num_layers
        down = self._filled(range(num - 1, -1, -1), Phase.BACKWARD, limit)
        if self.run_type == "infer":
            return self._filled(range(num), Phase.FORWARD, limit), []
        top = down[0].start if self.run_type == "fused" else num
        return self._filled(range(top), Phase.FORWARD, limit), down

    def _filled(self, layers: range, phase: Phase, limit: float) -> list[range]:
        stages: list[range] = []
        for layer in layers:
            alone = range(layer, layer + 1)
            if stages:
                held = stages[-1]
                wider = range(min(held.start, layer), max(held.stop, layer + 1))
                if self._fits(wider, phase, limit):
                    stages[-1] = wider
                    continue
            stages.append(alone)
        return stages

    def _fits(self, layers: range, phase: Phase, limit: float) -> bool:
        if self.seconds(layers, phase) > limit * _ROUNDING:
            return False
        return self.stage_bytes is None or slot_bytes(self.costs, layers, phase) <= self.stage_bytes
