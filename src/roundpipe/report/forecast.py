"""What a plan comes to, as data: what is needed and what is there, how fast, how long, what to do.

Filled in by `roundpipe.finetune.forecast`; nothing here computes or knows where figures come
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Need:
    """Bytes of one place. ``has``: None where nobody knows. ``largest``: what takes most of it."""

    place: str  # gpu, cpu, host, disk
    name: str  # in a sentence: device memory, host memory, disk
    needs: int
    has: int | None
    largest: str

    @property
    def fits(self) -> bool:
        """Whether there is room, as far as is known."""
        return self.has is None or self.needs <= self.has


@dataclass(frozen=True)
class Pace:
    """The step of the chosen plan. ``busy``: share of it in which devices compute."""

    tokens_per_second: float
    step_seconds: float
    busy: float
    bound: str
    schedule: str
    micro_batch_size: int
    microbatches: int
    rounds: int
    stages_forward: tuple[range, ...]
    stages_fused: range
    stages_backward: tuple[range, ...]
    replicas: tuple[int, int, int] = (1, 1, 1)  # forward, fused, backward
    alternatives: tuple[tuple[str, float], ...] = ()  # schedule, seconds of a step


@dataclass(frozen=True)
class Duration:
    """A whole job. ``what`` it goes over; ``note`` says what its length rests on."""

    steps: int
    seconds: float
    what: str
    note: str = ""


@dataclass(frozen=True)
class Hint:
    """``text`` is a ready ``key=value``; ``effect`` what comes of it."""

    text: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.effect})" if self.effect else self.text


@dataclass(frozen=True)
class Reasons:
    """Why a step takes as long as it does, from the played steps.

    ``idle``: share of all devices' time by reason. ``critical``: share of the time along what the
    end of the last step waited for, by kind of work.
    """

    ceiling: float  # tokens per second if all work with full recompute were spread without a wait
    idle: Mapping[str, float]
    critical: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that `roundpipe plan` says of one job."""

    title: str
    needs: tuple[Need, ...]
    bytes: Mapping[str, int]  # device, pinned_host, pageable_host, disk
    longest: int  # tokens
    longest_known: int | None = None  # that the model was made for
    pace: Pace | None = None  # None: no stage fits a device
    duration: Duration | None = None
    hints: tuple[Hint, ...] = ()
    reasons: Reasons | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""  # with the schedule that was asked for: no plan of it fits

    @property
    def fits(self) -> bool:
        """Whether the job would run."""
        return not self.problem and all(need.fits for need in self.needs)

    @property
    def limit(self) -> str:
        """What does not fit; of a job that fits, what bounds its speed."""
        lacking = [need.name for need in self.needs if not need.fits]
        if lacking:
            return ", ".join(lacking)
        return self.pace.bound if self.pace is not None else "device memory"

    def as_values(self) -> dict[str, Any]:
        """The plain values that ``--json`` prints. Seconds and bytes; stages are [first, last]."""
        pace = self.pace

        def ends(stages: tuple[range, ...]) -> list[list[int]]:
            return [[stage[0], stage[-1]] for stage in stages]

        return {
            "fits": self.fits,
            "tokens_per_second": None if pace is None else pace.tokens_per_second,
            "step_seconds": None if pace is None else pace.step_seconds,
            "bubble_percent": None if pace is None else 100 * (1 - pace.busy),
            "max_length": self.longest,
            "schedule": None if pace is None else pace.schedule,
            "microbatches": None if pace is None else pace.microbatches,
            "rounds": None if pace is None else pace.rounds,
            "stages_forward": [] if pace is None else ends(pace.stages_forward),
            "stages_backward": (
                [] if pace is None else ends((pace.stages_fused, *pace.stages_backward))
            ),
            "bytes": dict(self.bytes),
            "limit": self.limit,
            "alternatives": (
                []
                if pace is None
                else [{"schedule": name, "step_seconds": s} for name, s in pace.alternatives]
            ),
        }


@dataclass(frozen=True)
class Cell:
    """One model by one method: ``longest`` tokens at so many a second, or what is missing."""

    longest: int = 0
    tokens_per_second: float = 0.0
    missing: tuple[tuple[str, int], ...] = ()  # place, bytes


@dataclass(frozen=True)
class ModelTable:
    """What a machine can train: a row a model, a column a method."""

    machine: str
    length: int  # at which speeds are told
    methods: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...] = ()

    def as_values(self) -> dict[str, Any]:
        """The plain values that ``--json`` prints."""
        models = [
            {
                "model": name,
                "method": method,
                "fits": not cell.missing,
                "max_length": cell.longest,
                "tokens_per_second": cell.tokens_per_second if not cell.missing else None,
                "missing": dict(cell.missing),
            }
            for name, cells in self.rows
            for method, cell in zip(self.methods, cells, strict=True)
        ]
        return {"machine": self.machine, "length": self.length, "models": models}
