"""Memory over time: what devices and host hold while the steps of a timeline run.

By the planner's own rule (``roundpipe.plan.memory``): a slot is held from the first byte of a visit
that comes up to its last use, activations of a microbatch while the visit computes, and on the host
an input from the forward that hands it out to the stage that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.memory import microbatch_bytes, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit
    from roundpipe.plan.timeline import Span, StepSpans

Series = list[tuple[float, float]]  # (seconds, bytes), each from its moment on
_Changes = list[tuple[float, int]]


def memory_over_time(
    steps: Iterable[StepSpans], costs: Costs, *, host_bytes: int = 0
) -> dict[str, Series]:
    """Bytes held by each device (``"0.memory"``) and by the host (``"host.memory"``).

    ``host_bytes``: what the host holds all the time: weights, gradients, masters and moments.
    """
    changes: defaultdict[str, _Changes] = defaultdict(list)
    for step in steps:
        lives: dict[int, list[Span]] = {}
        for span in step.spans:
            if span.action.op in (*COMPUTE, Op.UPLOAD, Op.DOWNLOAD):
                lives.setdefault(span.action.index, []).append(span)
        for number, spans in lives.items():
            visit = step.visits[number]
            changes[f"{visit.device}.memory"] += _of_visit(costs, visit, spans)
        changes["host.memory"] += _of_inputs(costs, step)
    series = {}
    for name, found in changes.items():
        ordered = sorted(found)
        base = host_bytes if name == "host.memory" else 0
        sums = accumulate((size for _, size in ordered), initial=base)
        next(sums)
        # Of changes at one moment only what they come to counts.
        after = {at: float(size) for (at, _), size in zip(ordered, sums, strict=True)}
        series[name] = list(after.items())
    return series


def peaks(series: Mapping[str, Series]) -> dict[str, int]:
    """The most bytes each holds at any moment."""
    return {name: int(max((size for _, size in each), default=0)) for name, each in series.items()}


def _of_visit(costs: Costs, visit: Visit, spans: list[Span]) -> _Changes:
    slot = slot_bytes(costs, visit.layers, visit.phase)
    found = [
        (min(span.start for span in spans), slot),
        (max(span.end for span in spans), -slot),
    ]
    compute = [span for span in spans if span.action.op in COMPUTE]
    if compute:
        size = microbatch_bytes(costs, visit.layers, visit.phase)
        found.append((min(span.start for span in compute), size))
        found.append((max(span.end for span in compute), -size))
    return found


def _of_inputs(costs: Costs, step: StepSpans) -> _Changes:
    made: dict[tuple[int, int | None], float] = {}
    for span in step.spans:
        if span.action.op is Op.FORWARD:
            for boundary in step.visits[span.action.index].saves:
                made[boundary, span.action.microbatch] = span.end
    found: _Changes = []
    for span in step.spans:
        if span.action.op in (Op.RECOMPUTE, Op.FUSED):
            start = step.visits[span.action.index].layers.start
            begin = made.get((start, span.action.microbatch))
            if begin is not None:
                size = costs.layers[start].boundary_bytes
                found += [(begin, size), (max(span.end, begin), -size)]
    return found
