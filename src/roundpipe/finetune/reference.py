"""How fast a reference model would train on a machine: what doctor's findings are priced with.

The first of a few well-known jobs that the measured machine can hold is the reference; every price
of one report is of the same job. Estimated from its config alone and played by the planner, so a
price is worth as much as a plan. Nothing is loaded before the first price is asked for.
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
from roundpipe.sim.search import Setting, choose

if TYPE_CHECKING:
    from roundpipe.models.estimate.method import MethodName
    from roundpipe.models.estimate.profile import Profile
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine

_LENGTH = 2048
_MICROBATCHES_EACH = 4  # for each device, and 16 at least
_JOBS: tuple[tuple[str, MethodName], ...] = (
    ("meta-llama/Llama-3.1-8B", "full"),
    ("meta-llama/Llama-3.1-8B", "lora"),
    ("Qwen/Qwen3-1.7B", "lora"),
    ("HuggingFaceTB/SmolLM2-135M", "lora"),
)


@dataclass
class Reference:
    """A speed that can be asked of machines like ``measured``; tokens per second, None: no room.

    Dtype: bf16 where every card has it, else fp16; fp32 on the CPU.
    """

    measured: Machine
    _profile: Profile | None = None
    _known: list[tuple[Machine, float | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Which job it is, in a few words."""
        profile, job = self._chosen(), self._job
        return (
            f"{profile.name}, {profile.method}, {job.dtype}, {self._microbatches} × "
            f"{job.length:,} tokens a step"
        )

    def __call__(self, machine: Machine) -> float | None:
        """Tokens per second on ``machine``; None where it does not fit or cannot be played."""
        for known, speed in self._known:
            if known == machine:
                return speed
        speed = self._speed(self._chosen(), machine)
        self._known.append((machine, speed))
        return speed

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

    def _chosen(self) -> Profile:
        """The first job that the measured machine can hold; else the last."""
        if self._profile is None:
            for model, method in _JOBS:
                profile = _profile(model, method, bits=self._job.bits)
                if self._speed(profile, self.measured) is not None:
                    break
            self._profile = profile
        return self._profile

    def _speed(self, profile: Profile, machine: Machine) -> float | None:
        each = [costs(profile, card, self._job) for card in machine.cards]
        needed = sum(layer.pinned_bytes + layer.pageable_bytes for layer in each[0].layers)
        if needed > machine.host.memory_bytes:
            return None
        work = [_work(of) for of in each]
        setting = Setting(
            costs=each[0],
            devices=machine.num_devices,
            microbatches=self._microbatches,
            machine=machine,
            speeds=tuple(work[0] / seconds for seconds in work),
        )
        try:
            seconds = choose(setting).seconds
        except (PlanError, ConfigError):
            return None
        if not math.isfinite(seconds):
            return None
        return self._microbatches * self._job.microbatch_size * self._job.length / seconds


def _profile(model: str, method: MethodName, *, bits: int) -> Profile:
    name, fields = find_config(model)
    return count(make_config(fields), Method(name=method), name=name, bits=bits)


def _work(of: Costs) -> float:
    return sum(2 * layer.forward_seconds + layer.backward_seconds for layer in of.layers)
