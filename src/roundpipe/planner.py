"""Chooses plans for a model and lowers them to programs; keeps both.

A plan is chosen from sizes at first and once more from what was measured: the number of
microbatches
never changes, so neither do the results. A program is kept for each start device, because the deal
goes on from step to step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.engine.measure import costs_from_sizes, measured
from roundpipe.engine.program import Program
from roundpipe.errors import ConfigError, PlanError
from roundpipe.plan.check import check
from roundpipe.plan.generators import at_start_device, forward_only
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.search import Plan, Setting, choose, given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.config import ModelExecutePlan
    from roundpipe.engine.run import Run
    from roundpipe.models.spec import ModelSpec
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Schedule
    from roundpipe.store.layer import HostLayer

logger = logging.getLogger(__name__)

_CPU_COPY_SECONDS_PER_BYTE = 1.5e-10  # on the CPU a copy takes a core's time from computing


@dataclass(frozen=True)
class Kind:
    """What decides a training step's schedule, the start device apart."""

    plan: Plan
    num_microbatches: int
    staleness: int = 0
    accumulate: bool = False


class Planner:
    """See the module docstring. ``schedule`` is a name that ``roundpipe.sim.search`` knows."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[HostLayer],
        *,
        num_devices: int,
        schedule: str,
        memory_limit: int | None,
        on_cpu: bool,
    ) -> None:
        self._spec, self._layers = spec, layers
        # On the CPU copies take the cores that compute, so replicas bring nothing there.
        is_plain = schedule == "auto" and on_cpu
        self._num_devices, self._schedule = num_devices, "round_robin" if is_plain else schedule
        self._memory_limit, self._on_cpu = memory_limit, on_cpu
        self._plans: dict[tuple[int, Partition | None], Plan] = {}
        self._lowered: dict[Kind | int, Schedule] = {}  # int: forward only, so many microbatches
        self._programs: dict[tuple[Kind | int, int], Program] = {}
        self.costs = costs_from_sizes(spec, layers)
        choose(self._setting(1), schedule)  # an unknown name or a layer that cannot fit: now

    def restart(self) -> None:
        """Begin from sizes again: what is trained has changed."""
        self.costs = costs_from_sizes(self._spec, self._layers)
        self._forget()

    def _forget(self) -> None:
        for kept in (self._plans, self._lowered, self._programs):
            kept.clear()

    def learn(self, run: Run) -> None:
        """Plan anew from the times of ``run``, on devices that compute where they issue."""
        if self._on_cpu:
            self.costs = measured(self.costs, run)
            self._forget()

    def plan(self, num_microbatches: int, by_hand: ModelExecutePlan | None) -> Plan:
        """The plan for so many microbatches, chosen now or before."""
        partition = _partition(by_hand, self.costs) if by_hand is not None else None
        key = (num_microbatches, partition)
        if key not in self._plans:
            setting = self._setting(num_microbatches)
            plan = (
                choose(setting, self._schedule) if partition is None else given(setting, partition)
            )
            self._plans[key] = plan
            logger.info("plan: %s", plan)
        return self._plans[key]

    def training(self, kind: Kind, start_device: int) -> Program:
        """The program of one step of ``kind`` dealt from ``start_device`` on."""
        if kind not in self._lowered:
            computation = kind.plan.computation(
                self.costs, devices=self._num_devices, microbatches=kind.num_microbatches
            )
            options = Options(
                costs=self.costs, staleness=kind.staleness, accumulate=kind.accumulate
            )
            # What is added to gradients of the same step runs alone: it follows no step.
            self._lowered[kind] = _lowered(computation, options, steps=1 if kind.accumulate else 3)
        return self._program(kind, start_device)

    def forward(self, num_microbatches: int) -> Program:
        """The program of one pass without gradient; nothing else is under way when it runs."""
        if num_microbatches not in self._lowered:
            computation = forward_only(
                self.plan(num_microbatches, None).forward,
                devices=self._num_devices,
                microbatches=num_microbatches,
            )
            options = Options(costs=self.costs)
            self._lowered[num_microbatches] = _lowered(computation, options, steps=1)
        return self._program(num_microbatches, 0)

    def _program(self, key: Kind | int, start_device: int) -> Program:
        if (key, start_device) not in self._programs:
            schedule = at_start_device(self._lowered[key], start_device)
            self._programs[key, start_device] = Program(schedule)
        return self._programs[key, start_device]

    def _setting(self, num_microbatches: int) -> Setting:
        return Setting(
            costs=self.costs,
            devices=self._num_devices,
            microbatches=num_microbatches,
            memory_limit=self._memory_limit,
            copy_seconds_per_byte=_CPU_COPY_SECONDS_PER_BYTE if self._on_cpu else 0.0,
        )


def _lowered(computation: Schedule, options: Options, *, steps: int) -> Schedule:
    """Lower and check the last of a chain of ``steps``; of one, it follows nothing."""
    chain = lower_chain(computation, options, steps=steps)
    check(chain)
    return chain[-1]


def _partition(by_hand: ModelExecutePlan, costs: Costs) -> Partition:
    """A plan given by hand as a checked partition; raises PlanError if it misses a layer."""
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
    return partition
