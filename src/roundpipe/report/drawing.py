"""What the page's script draws, as plain data: places, their lanes, and spans as columns.

Columns of whole numbers, not one object a span: 20,000 spans are then half a megabyte, read at
once. Times are tenths of a microsecond since the record's beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.plan.actions import COMPUTE, OF_LAYERS
from roundpipe.report.figures import visit_words
from roundpipe.report.looks import (
    HOST,
    LOOKS,
    kind_of,
    layer_words,
    place_of,
    place_words,
    stream_order,
    stream_words,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from roundpipe.plan.timeline import Span, StepSpans
    from roundpipe.report.timeline_record import TimelineRecord

_TICKS = 1e7  # a second

_Placed = tuple[int, "Span"]  # which step of the record


def drawing_data(
    record: TimelineRecord, limits: Mapping[str, float], critical: Collection[Span]
) -> dict[str, Any]:
    """Return what ``page.js`` reads, made of what JSON knows."""
    timeline = record.timeline
    lanes: dict[str, list[_Placed]] = {}
    for at, step in enumerate(timeline.steps):
        for span in step.spans:
            lanes.setdefault(span.stream, []).append((at, span))
    places: dict[str, dict[str, Any]] = {}
    marked = set(critical)
    for name in sorted({*lanes, *record.counters}, key=stream_order):
        place = place_of(name)
        known = places.setdefault(
            place,
            {
                "name": place_words(place, timeline),
                "isHost": place == HOST,
                "lanes": [],
                "counters": [],
            },
        )
        if name in lanes:
            known["lanes"].append(_lane(record, name, lanes[name], marked))
        else:
            known["counters"].append(_counter(record, name, limits.get(name)))
    numbers = {
        span.action.index
        for step in timeline.steps
        for span in step.spans
        if span.action.op in OF_LAYERS
    }
    return {
        "seconds": record.end - record.begin,
        "ops": {op.value: [look.words, op.name.lower()] for op, look in LOOKS.items()},
        "steps": [
            {
                "step": step.step,
                "start": _ticks(record, _first_compute(step)),
                "visits": [visit_words(visit, timeline) for visit in step.visits],
            }
            for step in timeline.steps
        ],
        "layers": {str(n): layer_words(range(n, n + 1), timeline) for n in sorted(numbers)},
        "places": list(places.values()),
    }


def _lane(
    record: TimelineRecord, name: str, spans: Sequence[_Placed], marked: set[Span]
) -> dict[str, Any]:
    ordered = sorted(spans, key=lambda pair: (pair[1].start, pair[1].end))
    actions = [span.action for _, span in ordered]
    return {
        "name": stream_words(name),
        "computes": kind_of(name) == "compute",
        "op": "".join(action.op.value for action in actions),
        "step": [at for at, _ in ordered],
        "index": [action.index for action in actions],
        "microbatch": [-1 if a.microbatch is None else a.microbatch for a in actions],
        "chunk": [-1 if a.chunk is None else a.chunk for a in actions],
        "start": [_ticks(record, span.start) for _, span in ordered],
        "end": [_ticks(record, span.end) for _, span in ordered],
        "critical": [at for at, (_, span) in enumerate(ordered) if span in marked],
    }


def _counter(record: TimelineRecord, name: str, limit: float | None) -> dict[str, Any]:
    points = record.counters[name]
    return {
        "name": stream_words(name),
        "at": [_ticks(record, at) for at, _ in points],
        "bytes": [value for _, value in points],
        "limit": limit,
    }


def _first_compute(step: StepSpans) -> float:
    """Weights of a step may come up long before anything of it computes."""
    starts = [span.start for span in step.spans if span.action.op in COMPUTE]
    return min(starts or [span.start for span in step.spans], default=0.0)


def _ticks(record: TimelineRecord, seconds: float) -> int:
    return round((seconds - record.begin) * _TICKS)
