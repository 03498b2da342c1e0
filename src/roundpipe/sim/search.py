"""Choose a plan: play candidate schedules on the costs and take the quickest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

from roundpipe.errors import ConfigError
from roundpipe.plan.actions import Op
from roundpipe.plan.clocks import play
from roundpipe.plan.generators import Replicas, round_robin
from roundpipe.plan.partition import Partition, forward_stages, front

if TYPE_CHECKING:
    from roundpipe.plan.actions import Action
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Schedule

ScheduleName = Literal["auto", "round_robin", "hybrid"]
_LEAST_STAGES = 4
_NEAR = 0.01  # plans closer than this are as good as each other
_ACTION_SECONDS = 20e-6  # what issuing and handing over one compute action costs


@dataclass(frozen=True)
class Plan:
    """What was chosen, and why."""

    partition: Partition
    forward: tuple[range, ...]  # the stages of a pass without gradient
    replicas: Replicas
    seconds: float  # of one step by the costs, without transfers
    bound_seconds: float  # the same work spread evenly without any wait
    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is for. ``copy_seconds_per_byte`` is what copies take from a device's compute."""

    costs: Costs
    devices: int
    microbatches: int
    memory_limit: int | None = None
    copy_seconds_per_byte: float = 0.0


def choose(setting: Setting, name: str = "auto") -> Plan:
    """The quickest plan of one exact step for a schedule's name.

    ``round_robin`` (and ``auto``): every stage on one device, so that the same number of
    microbatches
    gives the same bits on any number of devices. ``hybrid``: stages of a kind may also run on
    several devices at once. Raises ConfigError for an unknown name, PlanError if nothing fits.
    """
    if name not in ("auto", "round_robin", "hybrid"):
        raise ConfigError(f"unknown schedule: {name}\nhint: auto, round_robin or hybrid")
    degrees = range(1, setting.devices + 1) if name == "hybrid" else (1,)
    tried: list[tuple[float, int, int, Partition, Replicas]] = []
    longest = _longest_stage(setting.costs)
    for partition in front(setting.costs, memory_limit=setting.memory_limit, longest=longest):
        for copies in product(degrees, repeat=3):
            replicas = Replicas(*copies)
            seconds = step_seconds(setting, partition, replicas)
            tried.append((seconds, partition.num_stages, sum(copies), partition, replicas))
    # What the calculation leaves out grows with stages and replicas: the simplest of the near best.
    near = min(tried, key=lambda plan: plan[0])[0] * (1 + _NEAR)
    simplest = min((plan for plan in tried if plan[0] <= near), key=lambda p: (p[1], p[2], p[0]))
    seconds, _, _, partition, replicas = simplest
    return _plan(setting, partition, replicas, seconds=seconds, what=f"best of {len(tried)} tried")


def _longest_stage(costs: Costs) -> float:
    """Seconds that a stage may take: a device holds one stage's weights and activations, not the
    model.

    A quarter of the step's work, or one layer that takes longer.
    """
    whole = range(costs.num_layers)
    work = _forward(costs, whole) + _both(costs, whole)
    return max(work / _LEAST_STAGES, *(_both(costs, range(layer, layer + 1)) for layer in whole))


def given(setting: Setting, partition: Partition, replicas: Replicas | None = None) -> Plan:
    """A plan with stages given by hand."""
    copies = replicas or Replicas()
    seconds = step_seconds(setting, partition, copies)
    return _plan(setting, partition, copies, seconds=seconds, what="given by hand")


def _plan(
    setting: Setting, partition: Partition, replicas: Replicas, *, seconds: float, what: str
) -> Plan:
    work = sum(_forward(setting.costs, stage) for stage in partition.forward)
    work += sum(_both(setting.costs, stage) for stage in (partition.fused, *partition.backward))
    bound = work * setting.microbatches / setting.devices
    longest = max(
        [_both(setting.costs, s) for s in (partition.fused, *partition.backward)]
        + [_forward(setting.costs, s) for s in partition.forward]
    )
    forward = forward_stages(setting.costs, longest)
    copies = (replicas.forward, replicas.fused, replicas.backward)
    on = "" if copies == (1, 1, 1) else " · on {} / {} / {} devices at once".format(*copies)
    why = (
        f"{partition}{on} · {setting.microbatches} microbatches on {setting.devices} devices: "
        f"{bound / seconds:.0%} of the even spread ({what})"
    )
    return Plan(partition, forward, replicas, seconds, bound, why)


def _forward(costs: Costs, stage: range) -> float:
    return sum(costs.layers[layer].forward_seconds for layer in stage)


def _both(costs: Costs, stage: range) -> float:
    return sum(
        costs.layers[layer].forward_seconds + costs.layers[layer].backward_seconds
        for layer in stage
    )


def step_seconds(setting: Setting, partition: Partition, replicas: Replicas) -> float:
    """How long one step takes from an idle start to the end of its last backward."""
    schedule = round_robin(
        partition,
        setting.costs,
        devices=setting.devices,
        microbatches=setting.microbatches,
        replicas=replicas,
    )
    costs = setting.costs

    def seconds(action: Action) -> float:
        layers = schedule.visits[action.index].layers
        forward = _forward(costs, layers)
        if action.op in (Op.FORWARD, Op.RECOMPUTE):
            return forward + _ACTION_SECONDS
        both = _both(costs, layers)
        return (both if action.op is Op.FUSED else both - forward) + _ACTION_SECONDS

    end = max(end for _, _, end in play(schedule.streams, schedule.waits, seconds))
    return end + _copied_bytes(setting, schedule) * setting.copy_seconds_per_byte / setting.devices


def _copied_bytes(setting: Setting, schedule: Schedule) -> int:
    """Weights up, gradients down; what several visits bring is copied once more to be added up."""
    total = 0
    givers = Counter(layer for v in schedule.visits if v.has_backward for layer in v.layers)
    for visit in schedule.visits:
        for layer in visit.layers:
            cost = setting.costs.layers[layer]
            copies = (1 + (givers[layer] > 1)) if visit.has_backward else 0
            total += cost.weight_bytes + copies * cost.gradient_bytes
    return total
