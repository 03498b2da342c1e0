"""A plan: what was chosen for a setting, and why; and what is run of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.generators import at_start_device
from roundpipe.plan.partition import forward_stages

if TYPE_CHECKING:
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.generators import Replicas
    from roundpipe.plan.partition import Partition
    from roundpipe.plan.schedule import Schedule
    from roundpipe.sim.candidate import Candidate
    from roundpipe.sim.score import Setting


@dataclass(frozen=True)
class Plan:
    """What was chosen, and why. ``alternatives``: the best of each other schedule, in seconds.

    Plans are equal that run alike, whatever made them the choice. ``made``: the computation, where
    it does not follow from the candidate.
    """

    candidate: Candidate
    forward: tuple[range, ...]  # the stages of a pass without gradient
    seconds: float = field(compare=False)  # of one step, in a chain of them
    # Work with full recompute spread evenly without any wait.
    bound_seconds: float = field(compare=False)
    why: str = field(compare=False)
    alternatives: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    made: Schedule | None = field(default=None, compare=False, repr=False)

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self.candidate.partition

    @property
    def replicas(self) -> Replicas:
        """On how many devices at once each kind of stage runs."""
        return self.candidate.replicas

    def computation(
        self, costs: Costs, *, devices: int, microbatches: int, start_device: int = 0
    ) -> Schedule:
        """What each device computes in one step."""
        if self.made is not None:
            return at_start_device(self.made, start_device)
        return self.candidate.computation(
            costs, devices=devices, microbatches=microbatches, start_device=start_device
        )

    def __str__(self) -> str:
        return self.why


def plan_of(
    setting: Setting,
    candidate: Candidate,
    seconds: float,
    what: str,
    alternatives: tuple[tuple[str, float], ...] = (),
) -> Plan:
    """The plan of a candidate that takes so many ``seconds``; ``what`` says how it was found."""
    bound = setting.even_seconds
    name = candidate.name(setting.devices).replace("_", "-")
    why = (
        f"{name} · {candidate} · {setting.microbatches} microbatches on {setting.devices} devices: "
        f"{bound / seconds:.0%} of the even spread ({what})"
    )
    forward = _forward(setting, _longest(setting.costs, candidate.partition))
    return Plan(candidate, forward, seconds, bound, why, alternatives)


def _forward(setting: Setting, longest: float) -> tuple[range, ...]:
    """The stages of a pass without gradient; where none are sure to fit, every layer by itself."""
    try:
        return forward_stages(setting.costs, longest, memory_limit=setting.device_bytes)
    except PlanError:
        return tuple(range(layer, layer + 1) for layer in range(setting.costs.num_layers))


def _longest(costs: Costs, partition: Partition) -> float:
    def seconds(stage: range, *, backward: bool) -> float:
        return sum(
            costs.layers[layer].forward_seconds + backward * costs.layers[layer].backward_seconds
            for layer in stage
        )

    stages = [seconds(stage, backward=True) for stage in (partition.fused, *partition.backward)]
    return max([*stages, *(seconds(stage, backward=False) for stage in partition.forward)])


@dataclass(frozen=True)
class Kind:
    """What decides a training step's schedule, the start device apart."""

    plan: Plan
    num_microbatches: int
    staleness: int = 0
    accumulate: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Pass:
    """A pass forward, or backward: ``continues`` one before."""

    stages: tuple[range, ...]
    num_microbatches: int
    saved: tuple[int, ...] = ()
    continues: bool = False
    to_inputs: bool = False
    staleness: int = 0
    accumulate: bool = False
    recomputed: int | None = None  # the lowest layer that a pass which continues it recomputes
