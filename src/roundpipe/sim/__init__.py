"""When it would run, by calculation: play schedules on machines, and choose among them.

``choose(Setting(costs=…, devices=…, microbatches=…, machine=…))`` is a `Plan`; ``play`` and
``simulate_machine`` give a `Simulation`. Pure Python, no torch, no threads.
"""

from roundpipe.plan.machine import Machine
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.memory import memory_over_time
from roundpipe.sim.score import Setting, play
from roundpipe.sim.search import Plan, ScheduleName, choose, given
from roundpipe.sim.simulate import (
    Idle,
    Simulation,
    bubble,
    compute_seconds,
    makespan,
    simulate,
    simulate_machine,
)
from roundpipe.sim.work import Prices

__all__ = [
    "Candidate",
    "Idle",
    "Machine",
    "Plan",
    "Prices",
    "ScheduleName",
    "Setting",
    "Simulation",
    "bubble",
    "choose",
    "compute_seconds",
    "given",
    "makespan",
    "memory_over_time",
    "play",
    "simulate",
    "simulate_machine",
]
