"""Two CPU devices against one thread, against torch's own pipelines, against the machine itself.

    python benchmarks/two_devices.py --json out/two_devices.json

Times one step of the same small decoder as (a) one serial thread, (b) this library on two devices
and on one, (c) torch.distributed.pipelining in two processes, (d) two copies of (a) at once, which
is what two cores of this machine can really do; alternately, in one run, every subject in its own
process. README.md beside this file says what is timed and what the keys mean.

Exit code: 0 all bars met, 1 a bar missed, 2 the subjects cannot be compared, 75 machine busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _verdict
from _child import ChildError, Group
from _machine import machine_facts
from _ours import LibrarySubject
from _peer import CANDIDATES, EVEN, RANKS, Peer, PeerSubject
from _serial import SerialSubject
from _verdict import COPIES, HYBRID, LIBRARY, ONE_DEVICE, SERIAL, Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _child import Sample

COPY_COUNT = 2
WARM_UPS = 3
TRIALS = 3


class Field:
    """Everyone who runs, in processes of their own, each to be sampled by name."""

    def __init__(self, folder: Path) -> None:
        self._groups: list[Group] = []
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def sample(self, name: str) -> Sample:
        """Time one step of a subject; a peer's name is its text form. Blocks until it is idle."""
        match name:
            case _verdict.SERIAL:
                return self._serial.sample(processes=1)
            case _verdict.COPIES:
                return self._serial.sample()
            case _verdict.LIBRARY:
                return self._two.sample()
            case _verdict.HYBRID:
                return self._hybrid.sample()
            case _verdict.ONE_DEVICE:
                return self._one.sample()
            case peer:
                return self._pair.sample(peer)

    def close(self) -> None:
        """End every process."""
        for group in self._groups:
            group.close()

    def _start(self, folder: Path) -> None:
        self._serial = self._group([(SerialSubject, ())] * COPY_COUNT)
        self._two = self._group([(LibrarySubject, (2, "auto"))])
        self._hybrid = self._group([(LibrarySubject, (2, "hybrid"))])
        self._one = self._group([(LibrarySubject, (1, "auto"))])
        rendezvous = str(folder / "rendezvous")
        self._pair = self._group([(PeerSubject, (rank, rendezvous)) for rank in range(RANKS)])

    def _group(self, builds: list[Any]) -> Group:
        self._groups.append(Group(builds))
        return self._groups[-1]


def choose_splits(field: Field) -> list[str]:
    """Return, for each schedule, the fastest of the hand-chosen splits on this machine now."""
    times: dict[Peer, list[float]] = defaultdict(list)
    for trial in range(TRIALS + 1):
        for peer in CANDIDATES:
            seconds = field.sample(str(peer)).seconds
            if trial:  # the first step of a split also negotiates shapes
                times[peer].append(seconds)
    best: dict[str, Peer] = {}
    for peer in sorted(CANDIDATES, key=lambda peer: min(times[peer])):
        best.setdefault(peer.schedule, peer)
    return [str(peer) for peer in best.values()]


def measure(field: Field, names: Sequence[str], rounds: int) -> dict[str, Figure]:
    """Let everyone take turns: a few untimed steps each, then ``rounds`` timed ones."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for turn in range(-WARM_UPS, rounds):
        for name in names:
            sample = field.sample(name)
            if turn >= 0:
                samples[name].append(sample)
    total = sum(sample.seconds for taken in samples.values() for sample in taken)
    return {name: _reduce(name, taken, total) for name, taken in samples.items()}


def _reduce(name: str, samples: list[Sample], total_seconds: float) -> Figure:
    losses = [sample.loss for sample in samples]
    copies = COPY_COUNT if name == COPIES else 1
    resting = total_seconds - sum(sample.seconds for sample in samples)
    return Figure(
        seconds=tuple(sample.seconds for sample in samples),
        busy_seconds=min(sample.busy_seconds for sample in samples),
        idle_share=sum(sample.idle_seconds for sample in samples) / max(resting, 1e-9),
        loss=losses[-1],
        loss_spread=(max(losses) - min(losses)) / abs(losses[-1]),
        gradient_norm=sqrt(samples[-1].gradient_square / copies),
        threads=max(sample.threads for sample in samples),
    )


def run(rounds: int) -> tuple[int, dict[str, Any]]:
    """Run the benchmark; the exit code and everything that is worth keeping."""
    result: dict[str, Any] = {"rounds": rounds, "machine": machine_facts()}
    with tempfile.TemporaryDirectory() as folder:
        field = Field(Path(folder))
        try:
            even = [str(peer) for peer in EVEN]
            peers = even + choose_splits(field)
            ours = [LIBRARY, HYBRID, ONE_DEVICE]
            figures = measure(field, [SERIAL, *ours, *peers, COPIES], rounds)
        finally:
            field.close()
    keys = _verdict.keys_of(figures, peers, even)
    faults = _verdict.faults_of(figures)
    code = _verdict.exit_code_of(keys, faults)
    result |= {
        "status": _verdict.STATUS[code],
        "keys": keys,
        "bars": {bar.key: str(bar) for bar in _verdict.BARS},
        "missed": [bar.key for bar in _verdict.BARS if not bar.is_met(keys)],
        "faults": faults,
        "figures": {name: figure.to_json() for name, figure in figures.items()},
    }
    return code, result


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines to print."""
    facts = result["machine"]
    yield (
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['torch']}, 1 thread each, "
        f"{result['rounds']} rounds, head = {facts['head_in_blocks']:.1f} blocks"
    )
    yield f"{'':24}{'min':>8}{'median':>8}{'max':>8}   seconds a step"
    for name, figure in result["figures"].items():
        spread = "".join(f"{figure[part]:8.3f}" for part in ("min", "median", "max"))
        yield f"{name:24}{spread}   {figure['busy_seconds']:.3f} s of processor"
    yield ""
    yield f"{'core_ratio':24}{result['keys']['core_ratio']:8.3f}   at least {_verdict.CORE_RATIO}"
    for bar in _verdict.BARS:
        verdict = "MISSED" if bar.key in result["missed"] else "met"
        yield f"{bar.key:24}{result['keys'][bar.key]:8.3f}   {bar}: {verdict}"
    yield f"{'hybrid_fraction':24}{result['keys']['hybrid_fraction']:8.3f}   no bar"
    yield from (f"cannot compare: {fault}" for fault in result["faults"])
    if result["status"] == "busy":
        yield "machine busy: two copies at once disturb each other, so this run is no result"


def main() -> int:
    """Parse the command line, run, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each subject (15)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"rounds must be at least one: {arguments.rounds}")
    try:
        code, result = run(arguments.rounds)
        lines = [*describe(result)]
    except ChildError as error:
        code, result = _verdict.INVALID, {"status": "failed", "error": str(error)}
        lines = [f"a subject failed: {error}"]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
