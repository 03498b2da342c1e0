"""Print the bubbles of five schedules beside published ones: the same layer times and stages.

Eight devices, sixteen microbatches, one step. A boundary that changes devices is on its way for the
given time; nothing else moves. The bubble is the share of device time between the first start and
the last end that is not spent computing, recompute counted as computing.

    python benchmarks/published_schedules.py
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.baselines import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    with_waiting_recompute,
)
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.sim.simulate import bubble, compute_seconds, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.plan.schedule import Schedule

FIGURES = Path(__file__).parent.parent / "tests" / "reference" / "published.json"
DEVICES, MICROBATCHES, ROUNDS = 8, 16, 2
BASELINES: dict[str, tuple[str, Callable[..., Schedule]]] = {
    "gpipe": ("gpipe_1f1b", gpipe),
    "1f1b": ("gpipe_1f1b", one_f_one_b),
    "interleaved_1f1b": ("looped", interleaved),
    "looped_bfs": ("looped", looped_bfs),
}
ROUND_ROBIN = "roundpipe_sync_two_rounds_of_8"
_RUN = re.compile(r"(?:(\d+) (?:of|stages of) )?(\d+)")


def figures() -> dict[str, Any]:
    """The published figures."""
    found: dict[str, Any] = json.loads(FIGURES.read_text())
    return found


def counts(text: str | list[int | str]) -> list[int]:
    """Decoder layers of each stage, written as a list or as ``2, 2, then 20 stages of 3``.

    The head, where a list or text begins with it, is left out.
    """
    parts = text if isinstance(text, list) else re.split(r",(?: then)? |head then ", text)
    found: list[int] = []
    for part in parts:
        match = _RUN.fullmatch(str(part).strip())
        if match is not None:
            found += [int(match[2])] * int(match[1] or 1)
        elif part not in ("", "head"):
            raise ValueError(f"not a number of layers: {part!r}")
    return found


@dataclass(frozen=True)
class Subject:
    """A model's layers: 0 is the embedding, which takes no time, the last is the head."""

    name: str
    costs: Costs
    hop: float  # how long a boundary takes to another device

    @classmethod
    def of(cls, published: dict[str, Any], name: str) -> Subject:
        """One of the published models."""
        times = published["layer_times_ms_one_4090"][name]
        decoder = published["models"][name]["layers"]
        layers = [
            _layer(0.0, 0.0),
            *[_layer(times["forward"], times["backward"])] * decoder,
            _layer(times["head_forward"], times["head_backward"]),
        ]
        return cls(name, Costs(tuple(layers), frozenset(range(len(layers)))), times["hop"])

    @property
    def head(self) -> int:
        """The last layer."""
        return self.costs.num_layers - 1

    def partition(self, published: dict[str, Any]) -> Partition:
        """The stages of round-robin: the head fused, the embedding with the first decoder layer."""
        given = published["partitions_used_in_their_simulation"][self.name]
        backward = list(_cut(counts(given["backward"])[::-1], self.head))[::-1]
        forward = _cut(counts(given["forward"]), self.head)
        return Partition(tuple(forward), range(self.head, self.head + 1), tuple(backward))

    def stages(self, published: dict[str, Any], kind: str) -> list[range]:
        """The stages of weight-bound schedules: embedding in the first, head in the last."""
        given = counts(published["baseline_partitions"][kind][self.name])
        *below, last = _cut(given, self.head)
        return [*below, range(last.start, self.head + 1)]

    def bubble(self, schedule: Schedule) -> float:
        """In percent, of one step played alone."""
        device = {
            action: visit.device
            for visit in schedule.visits
            for microbatch in visit.microbatches
            for action in visit.compute(microbatch)
        }

        def delay(made: Action, user: Action) -> float:
            return 0.0 if device[made] == device[user] else self.hop

        return 100 * bubble(simulate(schedule, self._seconds(schedule), delay=delay))

    def _seconds(self, schedule: Schedule) -> Callable[[Action], float]:
        """Durations by layers; of a last stage that is not fused the head is not recomputed."""
        whole = compute_seconds(schedule, self.costs)
        head = self.costs.layers[self.head].forward_seconds

        def seconds(action: Action) -> float:
            stop = schedule.visits[action.index].layers.stop
            is_head = action.op is Op.RECOMPUTE and stop == self.costs.num_layers
            return whole(action) - head if is_head else whole(action)

        return seconds


def _layer(forward: float, backward: float) -> LayerCost:
    return LayerCost(forward_seconds=forward, backward_seconds=backward, gradient_bytes=1)


def _cut(sizes: list[int], head: int) -> Iterator[range]:
    """Ranges of so many decoder layers, bottom up; the embedding is in the first."""
    edges = [0, *(1 + sum(sizes[: at + 1]) for at in range(len(sizes) - 1)), head]
    if sum(sizes) != head - 1:
        raise ValueError(f"stages hold {sum(sizes)} decoder layers of {head - 1}: {sizes}")
    return (range(first, stop) for first, stop in itertools.pairwise(edges))


def round_robin_bubble(published: dict[str, Any], name: str) -> float:
    """Of round-robin in two rounds of eight microbatches, in percent."""
    subject = Subject.of(published, name)
    schedule = round_robin(
        subject.partition(published),
        subject.costs,
        devices=DEVICES,
        microbatches=MICROBATCHES,
        rounds=ROUNDS,
    )
    return subject.bubble(schedule)


def baseline_bubbles(published: dict[str, Any], row: str, name: str) -> tuple[float, float]:
    """Of a weight-bound schedule, with recompute behind its gradient and ahead of it."""
    kind, generate = BASELINES[row]
    subject = Subject.of(published, name)
    schedule = generate(
        subject.stages(published, kind),
        subject.costs,
        devices=DEVICES,
        microbatches=MICROBATCHES,
        fused=False,
    )
    return subject.bubble(with_waiting_recompute(schedule)), subject.bubble(schedule)


def table() -> Iterator[str]:
    """The lines to print, as a table of Markdown."""
    published = figures()
    rows = published["simulated_bubble_percent_8_gpus_16_microbatches"]
    names = rows["order"]
    yield f"| bubble, % | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"

    def line(what: str, values: list[float], digits: int) -> str:
        return f"| {what} | {' | '.join(f'{value:.{digits}f}' for value in values)} |"

    for row in BASELINES:
        ours = [baseline_bubbles(published, row, name) for name in names]
        yield line(f"{row}, published", rows[row], 1)
        yield line(f"{row}", [waiting for waiting, _ in ours], 2)
        yield line(f"{row}, recompute ahead of its gradient", [ahead for _, ahead in ours], 2)
    yield line("round-robin, two rounds of 8, published", rows[ROUND_ROBIN], 2)
    yield line("round-robin", [round_robin_bubble(published, name) for name in names], 2)


if __name__ == "__main__":
    print("\n".join(table()))
