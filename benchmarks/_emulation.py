"""One case of `emulated.py`: a schedule on the real engine and in the simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from roundpipe.device.emulated import emulate
from roundpipe.engine.call import LossRule, ask_training
from roundpipe.engine.caller import CallerState
from roundpipe.engine.engine import Engine
from roundpipe.engine.microbatch import Cut
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.program import Program
from roundpipe.engine.run import Call
from roundpipe.engine.updates import Update
from roundpipe.models.choose import spec_for
from roundpipe.models.ghost import ghost_chain, ghost_loss
from roundpipe.optim import AdamW
from roundpipe.optim.host import HostOptimizer
from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.check import check
from roundpipe.plan.generators import at_start_device
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.simulate import simulate_machine
from roundpipe.sim.work import Prices
from roundpipe.store.build import build_store

if TYPE_CHECKING:
    from roundpipe.engine.run import Run
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine
    from roundpipe.plan.schedule import Schedule


@dataclass(frozen=True)
class Emulated:
    """What a chain of steps took. Microseconds are of processor time for each action."""

    seconds: float  # of one step, emulated
    late_seconds: float  # by which the host was too late, all steps together
    peak_bytes: int
    actions: int  # of one step
    engine_us: float  # all but the next two
    work_us: float  # in what the actions run: ghost layers, copies of a few bytes
    clock_us: float  # what emulating took


def lowered(computation: Schedule, costs: Costs, **options: int) -> Schedule:
    """The step that follows others of its kind, checked."""
    chain = lower_chain(computation, Options(costs=costs, **options), steps=3)
    check(chain)
    return chain[-1]


def with_barrier(step: Schedule) -> Schedule:
    """The same where every upload waits for the last update of the step before."""
    last = next(a for a in reversed(step.streams["host"]) if a.op is Op.UPDATE)
    barrier = last.of_step_before()
    waits = dict(step.waits)
    for _, action in step.actions():
        if action.op is Op.UPLOAD:
            waits[action] = (*waits.get(action, ()), barrier)
    return replace(step, waits=waits)


def steps_of(step: Schedule, count: int) -> list[Schedule]:
    """So many steps, each dealt from where the one before ended."""
    turn = step.next_start_device - step.start_device
    starts = [(step.start_device + turn * at) % step.num_devices for at in range(count)]
    return [at_start_device(step, start) for start in starts]


def simulated_seconds(step: Schedule, costs: Costs, machine: Machine, *, steps: int) -> float:
    """Seconds of one step by calculation, between the ends of the first and the last."""
    done = simulate_machine(steps_of(step, steps), Prices(costs=costs), machine)
    return done.step_seconds(0, steps - 1)


def emulate_steps(
    step: Schedule, costs: Costs, machine: Machine, *, steps: int, time_scale: float
) -> Emulated:
    """Train ghosts on the real engine, between the ends of the first step and the last."""
    programs = [Program(each, costs) for each in steps_of(step, steps)]
    devices = emulate(machine, time_scale=time_scale)
    clock = devices[0].clock
    with DevicePool(devices) as pool:
        ghosts = _Ghosts(pool, costs, step.num_microbatches)
        begin = time.process_time()
        runs = [ghosts.step(number, program) for number, program in enumerate(programs)]
        ghosts.engine.drain()
        process = time.process_time() - begin
        ends = [_end(run) for run in runs]
        actions = sum(1 for _ in step.actions())
        per_action = 1e6 / (actions * steps)
        peak = max(device.peak_bytes for device in devices)
        ghosts.engine.close()
        return Emulated(
            seconds=(ends[-1] - ends[0]) / (steps - 1),
            late_seconds=clock.late_seconds,
            peak_bytes=peak,
            actions=actions,
            engine_us=(process - clock.thread_seconds) * per_action,
            work_us=clock.work_seconds * per_action,
            clock_us=(clock.thread_seconds - clock.work_seconds) * per_action,
        )


class _Ghosts:
    """A chain of ghosts on an engine of its own: no planner chooses, the schedule is given."""

    def __init__(self, pool: DevicePool, costs: Costs, microbatches: int) -> None:
        spec = spec_for(ghost_chain(costs))
        self.layers = build_store([layer.tensors for layer in spec.layers])
        self.engine = Engine(pool, spec, self.layers)
        masters = [master for layer in self.layers for master in layer.masters.values()]
        self._optimizer = HostOptimizer(AdamW(masters, lr=1e-6), self.layers)
        inputs = torch.ones(microbatches, 1)
        self._asked = ask_training((inputs,), {}, None, ghost_loss, LossRule(cut=Cut(microbatches)))

    def step(self, number: int, program: Program) -> Run:
        """Begin one step as `RoundPipe` does; returns when its losses are there."""
        call = Call(
            microbatches=self._asked.microbatches,
            caller=CallerState.capture(),
            seed=0,
            step=number,
            loss=self._asked.loss,
        )
        run = self.engine.start(program, call, follows=number > 0)
        self.engine.wait_results(run)
        update = Update(self.layers, self._optimizer.begin(), max_norm=1.0, publish=True)
        self.engine.step(run, update)
        return run


def _end(run: Run) -> float:
    """When the last compute action of a run ended."""
    return max(span.end for span in run.timings.spans() if span.action.op in COMPUTE)
