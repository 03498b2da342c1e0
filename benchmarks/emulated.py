"""The real engine on eight emulated 4090s against the simulator, with published layer times.

    python benchmarks/emulated.py [--steps N] [--time-scale X] [--json FILE] [case ...]

Prints for each case seconds of one step, emulated and simulated, what the chunk pass and the order
rules by layer save, and what the engine itself takes of the host. Exits with 1 where emulated and
simulated steps differ by more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from _emulation import Emulated, emulate_steps, lowered, simulated_seconds, with_barrier
from _published import Published, eight_4090s, published

from roundpipe.plan.generators import Replicas, round_robin

if TYPE_CHECKING:
    from roundpipe.plan.schedule import Schedule

_NO_CHUNKS = 1 << 62  # bytes that a chunk has at least
_WITHIN = 0.03


@dataclass(frozen=True)
class Case:
    """A model, a kind of schedule, and what is changed of it."""

    model: str
    kind: str = "round-robin"
    change: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, self.kind, self.change)))


AGREEMENT = tuple(
    Case(model, kind) for model in ("1.7B", "8B") for kind in ("round-robin", "replicated")
)
MECHANISMS = tuple(
    Case(model, "round-robin", change)
    for model in ("8B", "32B")
    for change in ("", "no chunks", "one barrier")
)


@cache
def model(short: str) -> Published:
    return published(short)


def step(case: Case) -> Schedule:
    """The step that a case runs."""
    chosen = model(case.model)
    is_replicated = case.kind == "replicated"
    computation = round_robin(
        chosen.partition,
        chosen.costs,
        devices=8,
        microbatches=chosen.microbatches,
        rounds=1 if is_replicated else chosen.rounds,
        replicas=Replicas(8, 8, 8) if is_replicated else Replicas(),
    )
    options = {"min_chunk_bytes": _NO_CHUNKS} if case.change == "no chunks" else {}
    lowered_step = lowered(computation, chosen.costs, **options)
    return with_barrier(lowered_step) if case.change == "one barrier" else lowered_step


def run(case: Case, steps: int, time_scale: float) -> tuple[Emulated, float]:
    """Emulated and simulated."""
    schedule, costs, machine = step(case), model(case.model).costs, eight_4090s()
    simulated = simulated_seconds(schedule, costs, machine, steps=steps)
    return emulate_steps(schedule, costs, machine, steps=steps, time_scale=time_scale), simulated


def main() -> int:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--time-scale", type=float, default=0.02)
    parser.add_argument("--json")
    parser.add_argument("cases", nargs="*", help="words that a case's name must hold")
    given = parser.parse_args()
    cases = [
        case
        for case in dict.fromkeys((*AGREEMENT, *MECHANISMS))
        if all(word in str(case) for word in given.cases)
    ]
    print(
        f"{'case':30}{'emulated s':>11}{'simulated s':>12}{'off':>8}{'late ms':>9}{'GB':>6}"
        f"{'actions':>9}{'us: engine':>12}{'works':>7}{'clock':>7}"
    )
    rows, worst = {}, 0.0
    for case in cases:
        done, simulated = run(case, given.steps, given.time_scale)
        off = done.seconds / simulated - 1
        worst = max(worst, abs(off)) if not case.change else worst
        rows[str(case)] = {**asdict(done), "simulated_seconds": simulated}
        print(
            f"{case!s:30}{done.seconds:11.3f}{simulated:12.3f}{off:8.2%}"
            f"{done.late_seconds * 1e3:9.1f}{done.peak_bytes / 1e9:6.1f}{done.actions:9}"
            f"{done.engine_us:12.0f}{done.work_us:7.0f}{done.clock_us:7.0f}",
            flush=True,
        )
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(worst > _WITHIN)


if __name__ == "__main__":
    sys.exit(main())
