"""A run's timeline as a file: ``timeline.json``, bounded in size, and nothing in it is trusted.

::

    {"format": "roundpipe timeline", "version": 1, "title": …, "devices": […], "layers": […],
     "streams": ["0.compute", …],
     "steps": [{"step": 7,
                "visits": [[stage, phase, first layer, layer behind the last, device,
                            [microbatch, …]], …],
                "spans": [[stream, action, start, end], …]}, …],
     "counters": {"host.memory": [[seconds, bytes], …], …}}

A span's stream is its place among ``streams``; a visit's number is its place among ``visits``.
Seconds count from the record's earliest moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.plan.timeline import StepSpans, Timeline
from roundpipe.report.timeline_parse import FORMAT, VERSION, parse_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from roundpipe.plan.schedule import Visit

TIMELINE_FILE = "timeline.json"
_MOST_SPANS = 40_000  # written: about 2 MB
_MOST_BYTES = 64 << 20  # read
_DIGITS = 7  # of a second: what a card's clock tells

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class TimelineRecord:
    """What pictures and traces show.

    ``counters``: points (seconds, bytes) by name, named after streams: ``0.memory``,
    ``host.memory``. A value holds until the next.
    """

    title: str
    timeline: Timeline
    counters: Mapping[str, Points] = field(default_factory=dict)

    @cached_property
    def begin(self) -> float:
        """The earliest moment that anything is known of, in seconds; 0 if nothing is."""
        starts = [span.start for span in self.timeline.spans]
        return min([*starts, *(points[0][0] for points in self.counters.values() if points)] or [0])

    @cached_property
    def end(self) -> float:
        """The latest moment; ``begin`` if nothing is known."""
        ends = [span.end for span in self.timeline.spans]
        ends += [points[-1][0] for points in self.counters.values() if points]
        return max(ends, default=self.begin)


def shortened(record: TimelineRecord, most_spans: int = _MOST_SPANS) -> TimelineRecord:
    """Keep the last whole steps that have at most so many spans, one at least."""
    kept: list[StepSpans] = []
    room = most_spans
    for step in reversed(record.timeline.steps):
        room -= len(step.spans)
        if kept and room < 0:
            break
        if step.spans:
            kept.append(step)
    old = record.timeline
    timeline = Timeline(tuple(reversed(kept)), old.devices, old.layers)
    begin = min((span.start for span in timeline.spans), default=record.begin)
    counters = {
        name: tuple(point for point in points if point[0] >= begin)
        for name, points in record.counters.items()
    }
    return TimelineRecord(record.title, timeline, counters)


def record_text(record: TimelineRecord) -> str:
    """Return a record as the text of its file."""
    streams = sorted({span.stream for span in record.timeline.spans})
    places = {name: place for place, name in enumerate(streams)}

    def seconds(at: float) -> float:
        return round(at - record.begin, _DIGITS)

    steps = [
        {
            "step": step.step,
            "visits": [_visit(visit) for visit in step.visits],
            "spans": [
                [places[span.stream], str(span.action), seconds(span.start), seconds(span.end)]
                for span in step.spans
            ],
        }
        for step in record.timeline.steps
    ]
    content = {
        "format": FORMAT,
        "version": VERSION,
        "title": record.title,
        "devices": list(record.timeline.devices),
        "layers": list(record.timeline.layers),
        "streams": streams,
        "steps": steps,
        "counters": {
            name: [[seconds(at), value] for at, value in points]
            for name, points in record.counters.items()
        },
    }
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"


def read_record(path: Path) -> TimelineRecord:
    """Read what ``record_text`` wrote; raises ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        raise ConfigError(
            f"cannot read the timeline: {path}: {reason}\n"
            "hint: give the folder of a run of `roundpipe train` that has made a step"
        ) from error
    if len(raw) > _MOST_BYTES:
        raise _not_ours(path, f"larger than {_MOST_BYTES >> 20} MiB")
    try:
        content: Any = json.loads(raw, parse_constant=_refuse)
        title, timeline, counters = parse_timeline(content)
    except RecursionError:
        raise _not_ours(path, "nested too deep") from None
    except ValueError as error:  # JSON's and Unicode's own errors are of this kind too
        raise _not_ours(path, str(error)) from error
    return TimelineRecord(title, timeline, counters)


def _visit(visit: Visit) -> list[Any]:
    layers = visit.layers
    ends = [layers.start, layers.stop]
    return [visit.stage, visit.phase.value, *ends, visit.device, list(visit.microbatches)]


def _refuse(constant: str) -> float:
    raise ValueError(f"not a number: {constant}")


def _not_ours(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"not a timeline that can be read: {path}: {reason}\n"
        f"hint: train again; a run writes {TIMELINE_FILE} when it ends"
    )
