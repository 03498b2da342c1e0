"""Chooses plans for a model and lowers them to programs; keeps both.

A plan is chosen from sizes at first and anew from what was measured, once that has settled and when
it has drifted. What is chosen anew gives the same bits: the number of microbatches, replicas and
rounds stay, and so do results. A number of microbatches that comes up later (the short batch at the
end of an epoch) is planned with the replicas and rounds of the first: were they chosen from what
was measured by then, results would hang on the clock. A program is kept for each start device,
because the deal goes on from step to step.

[Note: activations not known yet] Until a microbatch was weighed nobody knows what autograd keeps of
a layer. So where a device's memory is limited every layer is a stage at first: no plan takes less.
Elsewhere no stage of several layers takes more than a quarter of a step's work: then memory is of
the size that any pipeline needs. Afterwards memory decides.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.engine.ground import ground_of
from roundpipe.engine.measure import (
    SECONDS_PER_WEIGHT,
    costs_from_sizes,
    measured,
    measured_by_visits,
    weighed,
)
from roundpipe.engine.program import Program
from roundpipe.errors import PlanError
from roundpipe.models.buffers import statistics_in
from roundpipe.models.ghost import declared_costs
from roundpipe.plan.by_hand import (
    backward_of,
    backward_part,
    balanced,
    forward_of,
    partition_in,
    partition_of,
    require_computation,
    require_whole,
)
from roundpipe.plan.check import check
from roundpipe.plan.generators import at_start_device, backward_only, forward_only
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.chosen import Kind, Pass, plan_of
from roundpipe.sim.score import Scores
from roundpipe.sim.search import Plan, Setting, choose, given, require_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.config import ModelExecutePlan
    from roundpipe.engine.pool import DevicePool
    from roundpipe.engine.run import Run
    from roundpipe.engine.weigh import Sizes
    from roundpipe.models.spec import ModelSpec
    from roundpipe.plan.by_hand import RunType, Stages
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine
    from roundpipe.plan.partition import Partition
    from roundpipe.plan.schedule import Schedule
    from roundpipe.sim.candidate import Candidate
    from roundpipe.store.layer import HostLayer

    ScheduleMaker = Callable[[Costs, Machine | None, int], Schedule]

logger = logging.getLogger(__name__)

_LEAST_STAGES = 4  # see [Note: activations not known yet]
_WORTH = 0.02  # what a plan must gain for a running one to be given up
_MEMORY_SHARE = 0.6  # of the smallest device, for the weights and gradients of balanced stages


class Planner:
    """See the module docstring.

    ``schedule`` is a name that ``roundpipe.sim.search`` knows, or a function of costs, machine and
    number of microbatches that gives what devices compute in a step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[HostLayer],
        pool: DevicePool,
        *,
        schedule: str | ScheduleMaker,
        memory_limit: int | None,
    ) -> None:
        self._spec, self._layers = spec, layers
        self._ground = ground_of(pool, memory_limit)
        self.devices = pool.devices
        self._make = None if isinstance(schedule, str) else schedule
        self._schedule = schedule if isinstance(schedule, str) else "round_robin"
        if self._schedule == "auto" and self._ground.is_on_cpu:
            # On the CPU copies take the cores that compute, so replicas bring nothing there.
            self._schedule = "round_robin"
        self._keep_order(is_needed=bool(statistics_in(spec.module)))
        self._plans: dict[tuple[int, Partition | None], Plan] = {}
        self.like: dict[int, Candidate] = {}  # whose bits plans are to have, see `candidates`
        self._trained: list[int] = []  # numbers of microbatches, in the order they were planned in
        self._lowered: dict[Kind | Pass, Schedule] = {}
        self._programs: dict[tuple[Kind | Pass, int], Program] = {}
        self.restart()
        self._require_layers()

    def restart(self) -> None:
        """Begin from sizes again: what is trained has changed."""
        declared = declared_costs(self._spec.module) if self._ground.is_emulated else None
        self.costs = declared or costs_from_sizes(self._spec, self._layers)
        self._is_weighed = declared is not None
        self._is_scaled = declared is not None or not self._ground.flops or self._ground.is_on_cpu
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans.clear()
        self.like = {}
        self._trained.clear()
        self._forget_programs()

    @property
    def machine(self) -> Machine | None:
        """The machine of its devices; None where it cannot be told."""
        return self._ground.machine

    @property
    def device_bytes(self) -> int | None:
        """What a device may hold, or had better not exceed; None where nothing limits it."""
        return self._ground.memory_limit or self._ground.soft_limit

    def _keep_order(self, *, is_needed: bool) -> bool:
        """Choose no replicas and no rounds where a buffer goes from microbatch to microbatch."""
        if not is_needed or self._schedule != "auto":
            return False
        self._schedule = "round_robin"
        return True

    def keep_order(self) -> None:
        """A layer was found to change a buffer in forward: plan so that it sees all in order."""
        if self._keep_order(is_needed=True):
            self._forget_plans()

    @property
    def learns(self) -> bool:
        """Whether times tell it anything: an emulated machine takes what was declared."""
        return not self._ground.is_emulated

    # ---- learning

    def learn(self, run: Run, sizes: Sizes | None, reason: str) -> None:
        """Plan anew from the times of ``run``, and once from what was weighed; devices are idle."""
        measure = measured if self._ground.is_on_cpu else measured_by_visits
        self.costs = measure(self.costs, run)
        if sizes is not None and not self._is_weighed:
            self._weigh(sizes)
        if self._make is None:
            self._plan_anew(reason)

    def _weigh(self, sizes: Sizes) -> None:
        """Know from now on what layers keep, if all that backward reaches have been weighed."""
        lowest = self.costs.first_trainable
        reached = range(self.costs.num_layers if lowest is None else lowest, self.costs.num_layers)
        if sizes.kept.keys() >= set(reached):  # not so where each layer is recomputed by itself
            self.costs, self._is_weighed = weighed(self.costs, sizes), True

    def _plan_anew(self, reason: str) -> None:
        for key, old in self._plans.items():
            num_microbatches, by_hand = key
            if by_hand is not None:
                continue
            setting = self._setting(num_microbatches)
            new = choose(setting, self._schedule, like=old.candidate)
            as_it_was = Scores(setting).of(old.candidate)
            if new == old or not new.seconds < (1 - _WORTH) * as_it_was:
                what = f"kept after a look, {reason}"
                self._plans[key] = plan_of(setting, old.candidate, as_it_was, what)
                continue
            gain = 1 - new.seconds / as_it_was
            gained = f"{gain:.0%} shorter than as it was" if gain < 1 else "it would not fit"
            self._plans[key] = replace(new, why=f"{new.why}; planned anew, {reason}: {gained}")
            logger.info("plan: %s", self._plans[key])
            self._forget_programs()

    def _forget_programs(self) -> None:
        self._lowered.clear()
        self._programs.clear()

    # ---- plans

    def plan(
        self, num_microbatches: int, by_hand: ModelExecutePlan | None, *, rows: int = 0
    ) -> Plan:
        """The plan for so many microbatches, chosen now or before.

        ``rows``: of one microbatch, by which a layer's weights are multiplied; tells how long it
        takes a card before that was measured. 0: for a pass without gradient.
        """
        partition = partition_of(by_hand, self.costs) if by_hand is not None else None
        key = (num_microbatches, partition)
        is_first = bool(rows) and partition is None and num_microbatches not in self._trained
        if is_first and self.candidates:
            self._plans.pop(key, None)  # of a pass, whose bits do not hang on it
        if key not in self._plans:
            self._scale(rows)
            self._plans[key] = plan = self._chosen(num_microbatches, partition)
            logger.info("plan: %s", plan)
        if is_first:
            self._trained.append(num_microbatches)
        return self._plans[key]

    def _chosen(self, num_microbatches: int, partition: Partition | None) -> Plan:
        setting = self._setting(num_microbatches)
        if partition is not None:
            return given(setting, partition)
        if self._make is not None:
            return self._made(setting, self._make)
        known = self.candidates
        like = known.get(num_microbatches, next(iter(known.values()), None))
        try:
            return choose(setting, self._schedule, like=like)
        except PlanError:
            if self._ground.memory_limit is not None or setting.memory_limit is None:
                raise
            # Nothing forbids a device of the CPU to take more than its share.
            return choose(replace(setting, memory_limit=None), self._schedule, like=like)

    @property
    def candidates(self) -> dict[int, Candidate]:
        """What steps run as, by number of microbatches, the first first.

        For ``like`` of a later process, which goes on with what it knows of it.
        """
        plans = {count: self._plans[count, None] for count in self._trained}
        chosen = {count: plan.candidate for count, plan in plans.items() if plan.made is None}
        return {**self.like, **chosen}

    def _made(self, setting: Setting, make: ScheduleMaker) -> Plan:
        made = make(self.costs, self._ground.machine, setting.microbatches)
        require_computation(made, devices=len(self.devices), microbatches=setting.microbatches)
        check([made])
        partition = partition_in(made)
        require_whole(partition, self.costs)
        plan = given(setting, partition)
        why = f"as schedule= gave it · {setting.microbatches} microbatches"
        return replace(plan, made=made, why=f"{why} on {setting.devices} devices")

    def _scale(self, rows: int) -> None:
        """From the number of operations to seconds, as soon as the size of a batch is known."""
        if self._is_scaled or not rows:
            return
        self._is_scaled = True
        each = max(2 * rows / self._ground.flops, SECONDS_PER_WEIGHT * 1e-6)
        self.costs = costs_from_sizes(self._spec, self._layers, seconds_per_weight=each)

    def _setting(self, num_microbatches: int) -> Setting:
        costs, ground = self.costs, self._ground
        limit = ground.memory_limit
        if limit is None and self._is_weighed:
            limit = ground.soft_limit
        is_scarce = limit is not None or ground.played_machine is not None
        work = sum(2 * cost.forward_seconds + cost.backward_seconds for cost in costs.layers)
        return Setting(
            costs=costs,
            devices=len(self.devices),
            microbatches=num_microbatches,
            machine=ground.played_machine,
            memory_limit=limit,
            longest=None if self._is_weighed else work / _LEAST_STAGES,
            by_layer=is_scarce and not self._is_weighed,
            speeds=ground.speeds,
            copy_seconds_per_byte=ground.copy_seconds_per_byte,
        )

    def _require_layers(self) -> None:
        """Raise for an unknown schedule or a layer that cannot fit: now, not in the first step."""
        require_plan(
            self._setting(1), "round_robin" if self._schedule == "auto" else self._schedule
        )

    # ---- programs

    def training(self, kind: Kind, start_device: int) -> Program:
        """The program of one step of ``kind`` dealt from ``start_device`` on."""
        if kind not in self._lowered:
            computation = kind.plan.computation(
                self.costs, devices=len(self.devices), microbatches=kind.num_microbatches
            )
            options = Options(
                costs=self.costs,
                staleness=kind.staleness,
                accumulate=kind.accumulate,
                eager=kind.eager,
            )
            # What is added to gradients of the same step runs alone: it follows no step.
            steps = 1 if kind.accumulate else 3
            self._lowered[kind] = _lowered(computation, options, steps=steps)
        return self._program(kind, start_device)

    def forward(self, num_microbatches: int, by_hand: ModelExecutePlan | None = None) -> Program:
        """The program of one pass without gradient; nothing else is under way when it runs."""
        if by_hand is not None:
            stages = forward_of(by_hand, self.costs)
        else:
            stages = self.plan(num_microbatches, None).forward
        return self._pass(Pass(stages, num_microbatches))

    def differentiable(
        self,
        num_microbatches: int,
        by_hand: ModelExecutePlan | None,
        *,
        to_inputs: bool,
        staleness: int,
        rows: int,
    ) -> tuple[Program, Callable[[bool], Program]]:
        """Programs of a pass forward that saves what its backward needs, and of that backward.

        The latter is told whether it adds to gradients of calls before in the step. ``to_inputs``:
        whether it gives gradients of what the first layer reads.
        """
        cut = None if by_hand is None else backward_part(by_hand)
        plan = self.plan(num_microbatches, cut, rows=rows)
        forward = forward_of(by_hand, self.costs) if by_hand is not None else plan.forward
        stages = backward_of(plan.partition, forward if to_inputs else (), self.costs)
        saved = tuple(sorted({stage.start for stage in stages} - {0}))
        onward = Pass(
            stages, num_microbatches, continues=True, to_inputs=to_inputs, staleness=staleness
        )
        lowest = min(stage.start for stage in stages)
        program = self._pass(Pass(forward, num_microbatches, saved, recomputed=lowest))
        return program, lambda accumulate: self._pass(replace(onward, accumulate=accumulate))

    def _pass(self, key: Pass) -> Program:
        """A pass on idle devices."""
        if key not in self._lowered:
            devices, count = len(self.devices), key.num_microbatches
            computation = (
                backward_only(
                    key.stages, devices=devices, microbatches=count, to_inputs=key.to_inputs
                )
                if key.continues
                else forward_only(
                    key.stages,
                    devices=devices,
                    microbatches=count,
                    saved=key.saved,
                    recomputed=key.recomputed,
                )
            )
            options = Options(costs=self.costs, staleness=key.staleness, accumulate=key.accumulate)
            self._lowered[key] = _lowered(computation, options, steps=1)
        return self._program(key, 0)

    def _program(self, key: Kind | Pass, start_device: int) -> Program:
        if (key, start_device) not in self._programs:
            schedule = at_start_device(self._lowered[key], start_device)
            program = Program(schedule)
            if self._ground.is_emulated:
                program = Program(schedule, self.costs, self._ground.speeds or ())
            self._programs[key, start_device] = program
        return self._programs[key, start_device]

    # ---- stages for others

    def balanced_stages(
        self,
        planners: Sequence[Planner],
        run_type: RunType,
        *,
        min_stages: int | None,
        upper_threshold: float,
        memory_limit: float | None,
    ) -> list[Stages]:
        """Stages for the models of ``planners``, balanced together, by what is measured so far.

        ``memory_limit``: bytes for the weights and gradients of a stage and the one that comes up
        behind it; None: a part of the smallest device.
        """
        machine = self._ground.played_machine
        if memory_limit is None and machine is not None:
            memory_limit = _MEMORY_SHARE * min(card.memory_bytes for card in machine.cards)
        return balanced(
            [planner.costs for planner in planners],
            run_type,
            min_stages=len(self.devices) if min_stages is None else min_stages,
            upper_threshold=upper_threshold,
            stage_bytes=None if memory_limit is None else int(memory_limit / 2),
        )


def _lowered(computation: Schedule, options: Options, *, steps: int) -> Schedule:
    """Lower and check the last of a chain of ``steps``; of one, it follows nothing."""
    chain = lower_chain(computation, options, steps=steps)
    check(chain)
    return chain[-1]
