"""From samples to keys, from keys to an exit code. Pure: no clock, no process, no torch.

The figure of a subject is its fastest sample: on a shared machine everything that disturbs a step
makes it longer, so the minimum is what repeats. The spread stands beside it. A run is no result at
all when the subjects did not do the same job, when one of them burnt processor time while another
was timed, or when the two cores were not really there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MET, MISSED, INVALID, BUSY = 0, 1, 2, 75
STATUS = {MET: "met", MISSED: "missed", INVALID: "invalid", BUSY: "busy"}
CORE_RATIO = 0.85
TOLERANCE = 1e-5
IDLE_SHARE = 0.01

SERIAL, COPIES, LIBRARY, ONE_DEVICE = "serial", "two copies", "two devices", "one device"
HYBRID = "two devices, hybrid"


@dataclass(frozen=True)
class Figure:
    """All samples of one subject, reduced. ``idle_share`` is of one processor, while not timed."""

    seconds: tuple[float, ...]
    busy_seconds: float
    idle_share: float
    loss: float
    loss_spread: float
    gradient_norm: float
    threads: int

    @property
    def best_seconds(self) -> float:
        """The fastest sample."""
        return min(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return what a file keeps of it."""
        times = self.seconds
        spread = {"min": min(times), "median": median(times), "max": max(times)}
        return spread | asdict(self)


@dataclass(frozen=True)
class Bar:
    """What one key must reach, and what one would like it to reach."""

    key: str
    limit: float
    at_most: bool = False
    aim: float | None = None

    def is_met(self, keys: Mapping[str, float]) -> bool:
        """Whether the key is on the right side of the limit."""
        return keys[self.key] <= self.limit if self.at_most else keys[self.key] >= self.limit

    def __str__(self) -> str:
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}{aim}"


BARS = (
    Bar("ceiling_fraction", 0.88, aim=0.95),
    Bar("vs_best_peer", 1.0),
    Bar("vs_even_peer", 1.15),
    Bar("one_device_overhead", 1.05, at_most=True),
)


def keys_of(
    figures: Mapping[str, Figure], peers: Sequence[str], even: Sequence[str]
) -> dict[str, float]:
    """Return the keys; ``even`` names those of ``peers`` that stand at the even split."""
    best = {name: figure.best_seconds for name, figure in figures.items()}
    return {
        "core_ratio": best[SERIAL] / best[COPIES],
        "ceiling_fraction": best[COPIES] / (2 * best[LIBRARY]),
        "vs_best_peer": min(best[peer] for peer in peers) / best[LIBRARY],
        "vs_even_peer": min(best[peer] for peer in even) / best[LIBRARY],
        "one_device_overhead": best[ONE_DEVICE] / best[SERIAL],
        "hybrid_fraction": best[COPIES] / (2 * best[HYBRID]),
    }


def faults_of(figures: Mapping[str, Figure]) -> list[str]:
    """Return why the samples cannot be compared: different jobs, or work outside the clock."""
    faults = []
    reference = figures[SERIAL]
    for name, figure in figures.items():
        if not _is_near(figure.loss, reference.loss) or figure.loss_spread > TOLERANCE:
            faults.append(f"loss of {name}: {figure.loss!r}, of {SERIAL}: {reference.loss!r}")
        if not _is_near(figure.gradient_norm, reference.gradient_norm):
            norms = f"{figure.gradient_norm!r}, of {SERIAL}: {reference.gradient_norm!r}"
            faults.append(f"gradient norm of {name}: {norms}")
        if figure.idle_share > IDLE_SHARE:
            faults.append(f"{name} ran while others were timed: {figure.idle_share:.1%} of a core")
    return faults


def exit_code_of(keys: Mapping[str, float], faults: Iterable[str]) -> int:
    """Return INVALID before BUSY before MISSED before MET."""
    if any(faults):
        return INVALID
    if keys["core_ratio"] < CORE_RATIO:
        return BUSY
    return MET if all(bar.is_met(keys) for bar in BARS) else MISSED


def _is_near(value: float, reference: float) -> bool:
    return abs(value - reference) <= TOLERANCE * abs(reference)
