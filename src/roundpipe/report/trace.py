"""A timeline as a trace file for a trace viewer (Perfetto, ``chrome://tracing``).

The Trace Event Format: one JSON object whose ``traceEvents`` are spans (``X``), counters (``C``),
arrows (``s`` to ``f``) and names (``M``). A process is a device or the host, a thread a stream.
Times are microseconds there; they are rounded to whole nanoseconds first, so that spans which touch
still touch and never overlap: a viewer drops a span that overlaps another of its thread.

Arrows follow each microbatch from the visit that computes its boundary, or the gradient of it, to
the visit that reads it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from roundpipe.plan.actions import COMPUTE, OF_LAYERS, Op
from roundpipe.plan.schedule import Phase
from roundpipe.report.looks import (
    HOST,
    LOOKS,
    layer_words,
    layers_of,
    place_of,
    place_words,
    stream_order,
    stream_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.plan.actions import Action
    from roundpipe.plan.timeline import Span, StepSpans
    from roundpipe.report.timeline_record import TimelineRecord

_HOST_PROCESS = 1_000_000  # behind every device
_Event = dict[str, Any]


def trace_text(record: TimelineRecord) -> str:
    """Return a record as the text of a trace file; time begins at its earliest moment."""
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"title": record.title},
        "traceEvents": _Trace(record).events(),
    }
    return json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n"


class _Trace:
    """``threads``: process and thread of each stream; ``starts``: of each action of each step."""

    def __init__(self, record: TimelineRecord) -> None:
        self.record, self.timeline = record, record.timeline
        streams = sorted({span.stream for span in self.timeline.spans}, key=stream_order)
        self.threads = {
            name: (_process(place_of(name)), at) for at, name in enumerate(streams, start=1)
        }
        self.starts: dict[tuple[int, Action], int] = {}

    def events(self) -> list[_Event]:
        return [*self._names(), *self._spans(), *self._arrows(), *self._counters()]

    def _names(self) -> Iterator[_Event]:
        places = [place_of(name) for name in (*self.threads, *self.record.counters)]
        for place in dict.fromkeys(places):
            process = _process(place)
            yield _meta("process_name", process, 0, name=place_words(place, self.timeline))
            yield _meta("process_sort_index", process, 0, sort_index=process)
        for name, (process, thread) in self.threads.items():
            yield _meta("thread_name", process, thread, name=stream_words(name))
            yield _meta("thread_sort_index", process, thread, sort_index=thread)

    def _spans(self) -> Iterator[_Event]:
        free: dict[str, int] = {}
        pairs = [(at, span) for at, step in enumerate(self.timeline.steps) for span in step.spans]
        for at, span in sorted(pairs, key=lambda pair: (pair[1].start, pair[1].end)):
            process, thread = self.threads[span.stream]
            start = max(self._nanoseconds(span.start), free.get(span.stream, 0))
            end = max(self._nanoseconds(span.end), start)
            free[span.stream] = end
            self.starts[at, span.action] = start
            look = LOOKS[span.action.op]
            yield {
                "ph": "X",
                "name": str(span.action),
                "cat": look.words,
                "cname": look.trace,
                "pid": process,
                "tid": thread,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": self._arguments(self.timeline.steps[at], span.action),
            }

    def _arguments(self, step: StepSpans, action: Action) -> dict[str, Any]:
        found: dict[str, Any] = {
            "op": LOOKS[action.op].words,
            "step": step.step,
            "layers": layer_words(layers_of(action, step), self.timeline),
        }
        if action.op not in OF_LAYERS:
            found["visit"] = action.index
            found["stage"] = step.visits[action.index].stage
        if action.microbatch is not None:
            found["microbatch"] = action.microbatch
        if action.chunk is not None:
            found["chunk"] = action.chunk
        return found

    def _arrows(self) -> Iterator[_Event]:
        number = 0
        for at, step in enumerate(self.timeline.steps):
            for way in _ways(step).values():
                for made, used in pairwise(way):
                    number += 1
                    yield self._arrow("s", number, made, self.starts[at, made.action])
                    yield self._arrow("f", number, used, self.starts[at, used.action], bp="e")

    def _arrow(self, phase: str, number: int, span: Span, start: int, **more: str) -> _Event:
        process, thread = self.threads[span.stream]
        event = {"ph": phase, "name": "microbatch", "cat": "microbatch", "id": number, **more}
        return {**event, "pid": process, "tid": thread, "ts": start / 1e3}

    def _counters(self) -> Iterator[_Event]:
        for name, points in self.record.counters.items():
            event = {"ph": "C", "name": stream_words(name), "pid": _process(place_of(name))}
            for seconds, value in points:
                at = self._nanoseconds(seconds) / 1e3
                yield {**event, "tid": 0, "ts": at, "args": {"bytes": value}}

    def _nanoseconds(self, seconds: float) -> int:
        return round((seconds - self.record.begin) * 1e9)


def _process(place: str) -> int:
    return _HOST_PROCESS if place == HOST else int(place) + 1  # viewers take 0 for their own


def _meta(what: str, process: int, thread: int, **arguments: Any) -> _Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _ways(step: StepSpans) -> dict[int | None, list[Span]]:
    """What computes each microbatch's boundaries, then their gradients, in order."""
    ways: dict[int | None, list[Span]] = {}
    for span in step.spans:
        if span.action.op in COMPUTE and span.action.op is not Op.RECOMPUTE:
            ways.setdefault(span.action.microbatch, []).append(span)

    def place(span: Span) -> tuple[bool, int]:
        visit = step.visits[span.action.index]
        is_back = visit.phase is Phase.BACKWARD
        return is_back, -visit.layers.stop if is_back else visit.layers.start

    return {microbatch: sorted(way, key=place) for microbatch, way in ways.items()}
