"""How fast a reference model would train on a machine: what doctor's findings are priced with.

The first of a few well-known jobs that the measured machine can hold is the reference; every price
of one report is of the same job. It is estimated from its config alone. A plan is searched for the
machine as measured; on a machine with other links or memory that plan and a fresh round-robin are
played, and the quicker one counts. Nothing is loaded before the first price is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError, PlanError
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import find_config, make_config
from roundpipe.models.estimate.costs import Job, costs
from roundpipe.models.estimate.method import Method
from roundpipe.sim.score import Scores
from roundpipe.sim.search import Plan, Setting, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.models.estimate.method import MethodName
    from roundpipe.models.estimate.profile import Profile
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine

    Load = Callable[[str, MethodName, int], Profile]

_LENGTH = 2048
_MICROBATCHES_EACH = 4  # for each device, and 16 at least
_JOBS: tuple[tuple[str, MethodName], ...] = (
    ("meta-llama/Llama-3.1-8B", "full"),
    ("meta-llama/Llama-3.1-8B", "lora"),
    ("Qwen/Qwen3-1.7B", "lora"),
    ("HuggingFaceTB/SmolLM2-135M", "lora"),
)


def load_profile(model: str, method: MethodName, bits: int) -> Profile:
    """Count a well-known model; takes a second or two."""
    name, fields = find_config(model)
    return count(make_config(fields), Method(name=method), name=name, bits=bits)


@dataclass(frozen=True)
class _Chosen:
    """The job of a report, and its plan on the measured machine; None: it has no room there."""

    profile: Profile
    plan: Plan | None


@dataclass
class Reference:
    """A speed that can be asked of machines like ``measured``: tokens per second, None: no room.

    Dtype: bf16 where every card has it, else fp16; fp32 on the CPU.
    """

    measured: Machine
    load: Load = load_profile
    _chosen: _Chosen | None = None
    _profiles: dict[str, Profile] = field(default_factory=dict)
    _known: list[tuple[Machine, float | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Which job it is, in a few words."""
        profile, job = self._choice().profile, self._job
        return (
            f"{profile.name}, {profile.method}, {job.dtype}, {self._microbatches} × "
            f"{job.length:,} tokens a step"
        )

    def __call__(self, machine: Machine) -> float | None:
        """Tokens per second on ``machine``; None where it does not fit or cannot be played."""
        for known, speed in self._known:
            if known == machine:
                return speed
        seconds = self._seconds(machine)
        tokens = self._microbatches * self._job.microbatch_size * self._job.length
        speed = None if seconds is None else tokens / seconds
        self._known.append((machine, speed))
        return speed

    def largest(self, machine: Machine) -> str:
        """The first of the jobs that the host memory of ``machine`` holds, or none in words."""
        for model, method in _JOBS:
            profile = self._profile(model, method)
            if self._setting(profile, machine) is not None:
                return f"{profile.name}, {profile.method}"
        return "none of them"

    @property
    def _job(self) -> Job:
        cards = self.measured.cards
        if any(card.in_host for card in cards):
            return Job(dtype="fp32", length=_LENGTH)
        has_bf16 = all("bf16" in card.flops for card in cards)
        return Job(dtype="bf16" if has_bf16 else "fp16", length=_LENGTH)

    @property
    def _microbatches(self) -> int:
        return max(16, _MICROBATCHES_EACH * self.measured.num_devices)

    def _choice(self) -> _Chosen:
        """The first job that the measured machine can hold; else the last."""
        if self._chosen is None:
            for model, method in _JOBS:
                profile = self._profile(model, method)
                setting = self._setting(profile, self.measured)
                plan = None if setting is None else _plan(setting, "auto")
                if plan is not None:
                    break
            self._chosen = _Chosen(profile, plan)
        return self._chosen

    def _profile(self, model: str, method: MethodName) -> Profile:
        if model + method not in self._profiles:
            self._profiles[model + method] = self.load(model, method, self._job.bits)
        return self._profiles[model + method]

    def _seconds(self, machine: Machine) -> float | None:
        chosen = self._choice()
        setting = self._setting(chosen.profile, machine)
        if setting is None:
            return None
        if chosen.plan is not None and machine == self.measured:
            return chosen.plan.seconds
        quick = chosen.plan is not None and machine.cards == self.measured.cards
        fresh = _plan(setting, "round_robin" if quick else "auto")
        tried = [math.inf if fresh is None else fresh.seconds]
        if chosen.plan is not None:
            tried.append(Scores(setting).of(chosen.plan.candidate))
        return min(tried) if math.isfinite(min(tried)) else None

    def _setting(self, profile: Profile, machine: Machine) -> Setting | None:
        """What is planned for; None if the host has no room."""
        each = [costs(profile, card, self._job) for card in machine.cards]
        needed = sum(layer.pinned_bytes + layer.pageable_bytes for layer in each[0].layers)
        if needed > machine.host.memory_bytes:
            return None
        work = [_work(of) for of in each]
        return Setting(
            costs=each[0],
            devices=machine.num_devices,
            microbatches=self._microbatches,
            machine=machine,
            speeds=tuple(work[0] / seconds for seconds in work),
        )


def _plan(setting: Setting, name: str) -> Plan | None:
    try:
        plan = choose(setting, name)
    except (PlanError, ConfigError):
        return None
    return plan if math.isfinite(plan.seconds) else None


def _work(of: Costs) -> float:
    return sum(2 * layer.forward_seconds + layer.backward_seconds for layer in of.layers)
