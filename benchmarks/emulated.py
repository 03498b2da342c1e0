"""The real engine on eight emulated 4090s against the simulator, with published layer times.

    python benchmarks/emulated.py [--steps N] [--host-bandwidth GB/s] [--json FILE] [word ...]

Prints for each case seconds of one step, emulated and simulated; by how much the host was late; the
most that a card held; microseconds of processor time for each action, of the engine, of what the
actions run and of the emulation itself; and what the chunk pass and the order rules by layer save.
Exits with 1 where emulated and simulated steps differ by more than 3 %.
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
    from collections.abc import Sequence

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
SAVERS = {"no chunks": "chunks", "one barrier": "order rules by layer"}


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


@dataclass(frozen=True)
class Result:
    """One case, emulated and simulated."""

    case: Case
    done: Emulated
    simulated_seconds: float

    @property
    def off(self) -> float:
        """By what share the emulated step is longer."""
        return self.done.seconds / self.simulated_seconds - 1


def run(case: Case, given: argparse.Namespace) -> Result:
    """Emulate and simulate."""
    schedule, costs = step(case), model(case.model).costs
    machine = eight_4090s(given.host_bandwidth * 1e9)
    simulated = simulated_seconds(schedule, costs, machine, steps=given.steps)
    done = emulate_steps(schedule, costs, machine, steps=given.steps, time_scale=given.time_scale)
    return Result(case, done, simulated)


def table(given: argparse.Namespace, cases: Sequence[Case]) -> list[Result]:
    """Run ``cases`` and print a line for each."""
    print(
        f"{'case':30}{'emulated s':>11}{'simulated s':>12}{'off':>8}{'late ms':>9}{'GB':>6}"
        f"{'actions':>9}{'us: engine':>12}{'works':>7}{'clock':>7}"
    )
    results = []
    for case in cases:
        results.append(run(case, given))
        done = results[-1].done
        print(
            f"{case!s:30}{done.seconds:11.3f}{results[-1].simulated_seconds:12.3f}"
            f"{results[-1].off:8.2%}{done.late_seconds * 1e3:9.1f}{done.peak_bytes / 1e9:6.1f}"
            f"{done.actions:9}{done.engine_us:12.0f}{done.work_us:7.0f}{done.clock_us:7.0f}",
            flush=True,
        )
    return results


def savings(results: Sequence[Result]) -> None:
    """Print what each mechanism saves of the step without it."""
    with_all = {r.case.model: r.done.seconds for r in results if r.case == Case(r.case.model)}
    for result in results:
        if result.case.change and result.case.model in with_all:
            saved = result.done.seconds - with_all[result.case.model]
            print(
                f"{result.case.model}: {SAVERS[result.case.change]} save {saved:.2f} s a step, "
                f"{saved / result.done.seconds:.1%}"
            )


def main() -> int:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--time-scale", type=float, default=0.02, help="real s per emulated s")
    parser.add_argument("--host-bandwidth", type=float, default=150.0, help="GB/s")
    parser.add_argument("--json")
    parser.add_argument("cases", nargs="*", help="words that a case's name must hold")
    given = parser.parse_args()
    every = dict.fromkeys((*AGREEMENT, *MECHANISMS))
    results = table(given, [c for c in every if all(word in str(c) for word in given.cases)])
    savings(results)
    if given.json:
        rows = {
            str(r.case): {**asdict(r.done), "simulated_seconds": r.simulated_seconds}
            for r in results
        }
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(r.off) > _WITHIN for r in results if not r.case.change))


if __name__ == "__main__":
    sys.exit(main())
