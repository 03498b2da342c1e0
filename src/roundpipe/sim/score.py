"""How long a step of a candidate takes: a short chain of steps, played on the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.host_bytes import host_bytes
from roundpipe.plan.passes import Options, outline
from roundpipe.plan.schedule_memory import schedule_bytes
from roundpipe.sim.simulate import simulate_machine
from roundpipe.sim.visit_graph import Steps
from roundpipe.sim.visits import VisitPlayer
from roundpipe.sim.work import Prices

if TYPE_CHECKING:
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine
    from roundpipe.plan.schedule import Schedule
    from roundpipe.sim.candidate import Candidate
    from roundpipe.sim.simulate import Simulation

_STEPS = 4  # of a chain: the first fill the pipeline, the last two are measured


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is for.

    ``machine``: without one transfers and updates take no time. ``memory_limit``: bytes a device
    may hold, beside what its card has; ``host_limit``: bytes of a step on the host.
    ``most_fused``: top layers that may be set apart to run without recompute; None: as many as
    fit. ``longest``: seconds that a stage of several layers may take of one microbatch, where
    ``costs`` do not say what activations take; ``by_layer``: every stage is one layer, where memory
    is scarce besides (except ``gpipe``'s, which are one a device). ``speeds``: of the devices,
    relative to the one that ``costs`` are of; by default all 1. ``hop_seconds``: how long a
    boundary is on its way from device to device; None: by its bytes and the links.
    ``copy_seconds_per_byte``: what copies take from a device's compute.
    """

    costs: Costs
    devices: int
    microbatches: int
    machine: Machine | None = None
    staleness: int = 0
    eager: bool = False
    memory_limit: int | None = None
    host_limit: int | None = None
    most_fused: int | None = None
    longest: float | None = None
    by_layer: bool = False
    speeds: tuple[float, ...] | None = None
    hop_seconds: float | None = None
    action_seconds: float = 20e-6  # what issuing and handing over one compute action costs
    copy_seconds_per_byte: float = 0.0
    most_visits: int = 80_000  # played by one search, about: what it costs
    norm_traffic: float = 1.0  # accesses to host memory per byte of a gradient for its norm

    @property
    def device_bytes(self) -> int | None:
        """What the smallest device holds; None: anything."""
        limits = [] if self.memory_limit is None else [self.memory_limit]
        if self.machine is not None:
            limits += [card.memory_bytes for card in self.machine.cards]
        return min(limits, default=None)

    @property
    def prices(self) -> Prices:
        """What actions cost in this setting."""
        return Prices(
            costs=self.costs,
            speeds=self.speeds or (),
            action_seconds=self.action_seconds,
            norm_traffic=self.norm_traffic,
        )

    @property
    def hop(self) -> float:
        """Seconds that a boundary is on its way: down one link and up another, both ways busy."""
        if self.hop_seconds is not None:
            return self.hop_seconds
        if self.machine is None:
            return 0.0
        size = max((layer.boundary_bytes for layer in self.costs.layers), default=0)
        return max(
            size / (link.up * link.duplex) + size / (link.down * link.duplex)
            for link in self.machine.links
        )

    @property
    def python_seconds(self) -> float:
        """What one process needs to issue a step with full recompute, whatever the devices."""
        layers = self.costs.layers
        each = sum(2 * cost.host_forward_seconds + cost.host_backward_seconds for cost in layers)
        return each * self.microbatches

    @property
    def work_seconds(self) -> float:
        """Compute of one step on one device of speed 1 if all but the last layer is recomputed."""
        layers = self.costs.layers
        lowest = self.costs.first_trainable
        seconds = 0.0
        for at, layer in enumerate(layers):
            is_last, is_trained = at == len(layers) - 1, lowest is not None and at >= lowest
            if is_trained or is_last:
                seconds += layer.backward_seconds + layer.forward_seconds * (1 + (not is_last))
            else:
                seconds += layer.forward_seconds
        return seconds * self.microbatches

    @property
    def even_seconds(self) -> float:
        """That work spread evenly over the devices: the ceiling with full recompute."""
        return self.work_seconds / sum(self.speeds or (1.0,) * self.devices)


def play(setting: Setting, candidate: Candidate, *, steps: int = _STEPS) -> Simulation:
    """A chain of steps of ``candidate`` in time."""
    options = Options(costs=setting.costs, staleness=setting.staleness, eager=setting.eager)
    chain = outline(computation(setting, candidate), options, steps=steps)
    return simulate_machine(chain, setting.prices, setting.machine, hop_seconds=setting.hop)


def computation(setting: Setting, candidate: Candidate) -> Schedule:
    """What the devices compute in one step."""
    return candidate.computation(
        setting.costs, devices=setting.devices, microbatches=setting.microbatches
    )


class Scores:
    """Seconds of a step of candidates, each played once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.seconds: dict[Candidate, float] = {}
        self.num_visits = 0  # played so far: what the search costs
        self.refusal: PlanError | None = None  # why the last one that cannot run cannot
        self.least_bytes: int | None = None  # that any of them takes of a device

    def of(self, candidate: Candidate) -> float:
        """Seconds of one step; infinite for what cannot run."""
        found = self.seconds.get(candidate)
        if found is None:
            try:
                found = self._play(candidate)
            except PlanError as error:
                self.refusal, found = error, math.inf
            self.seconds[candidate] = found
        return found

    def _play(self, candidate: Candidate) -> float:
        setting = self.setting
        visits = candidate.visits(
            setting.costs, devices=setting.devices, microbatches=setting.microbatches
        )
        limit, turn = setting.device_bytes, candidate.turn(visits, devices=setting.devices)
        if limit is not None:
            need = schedule_bytes(setting.costs, visits, devices=setting.devices, turn=turn)
            self.least_bytes = min(need, self.least_bytes or need)
            if need > limit:
                return math.inf
        most = setting.host_limit
        if most is not None and host_bytes(setting.costs, visits).total > most:
            return math.inf
        # What a step does to the next shows in the second one, an update left behind in the third.
        steps = Steps(
            visits=visits,
            devices=setting.devices,
            num_steps=_STEPS if setting.staleness else _STEPS - 1,
            turn=turn,
            staleness=setting.staleness,
            eager=setting.eager,
        )
        machine, hop = setting.machine, setting.hop
        played = VisitPlayer(steps, setting.prices, machine, hop_seconds=hop).play()
        self.num_visits += steps.num_steps * len(visits)
        ends = played.step_ends
        seconds = (ends[-1] - ends[-3]) / 2
        copied = setting.copy_seconds_per_byte * played.moved_bytes / steps.num_steps
        return max(seconds + copied / setting.devices, setting.python_seconds)
