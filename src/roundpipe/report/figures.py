"""What a timeline comes to in numbers: per stage, and per stream. The words beside the picture."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.report.looks import (
    layer_words,
    place_of,
    place_words,
    stream_order,
    stream_words,
)

if TYPE_CHECKING:
    from roundpipe.plan.schedule import Visit
    from roundpipe.plan.timeline import StepSpans, Timeline

_SECONDS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))
_Stage = tuple[int, str, range]
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class StageFigures:
    """``seconds``: of each kind of work on one microbatch, the median over all of them."""

    name: str
    layers: str
    devices: str
    seconds: dict[Op, float]

    @property
    def total(self) -> float:
        """Seconds of all work on one microbatch."""
        return sum(self.seconds.values())


def stage_figures(timeline: Timeline) -> list[StageFigures]:
    """The stages in the order of the step, over all steps that were cut as the last one was."""
    durations: dict[_Stage, dict[Op, list[float]]] = {}
    devices: dict[_Stage, set[int]] = {}
    for step in timeline.steps:
        if _stages(step) != _stages(timeline.steps[-1]):
            continue  # of another plan
        for span in step.spans:
            if span.action.op in COMPUTE:
                visit = step.visits[span.action.index]
                key = _stage(visit)
                of_op = durations.setdefault(key, {}).setdefault(span.action.op, [])
                of_op.append(span.end - span.start)
                devices.setdefault(key, set()).add(visit.device)
    return [
        StageFigures(
            name=f"{key[0]} · {key[1]}",
            layers=layer_words(key[2], timeline),
            devices=", ".join(map(str, sorted(devices[key]))),
            seconds={op: median(values) for op, values in of_ops.items()},
        )
        for key, of_ops in sorted(durations.items(), key=lambda item: item[0][:2])
    ]


def _stages(step: StepSpans) -> set[_Stage]:
    return {_stage(visit) for visit in step.visits}


def _stage(visit: Visit) -> _Stage:
    return visit.stage, visit.phase.value, visit.layers


@dataclass(frozen=True)
class StreamFigures:
    """One stream: how many actions it ran, how long, and which share of the whole time."""

    place: str
    stream: str
    actions: int
    seconds: float
    share: float


def stream_figures(timeline: Timeline) -> list[StreamFigures]:
    """Every stream in the order in which the picture shows them."""
    spans = timeline.spans
    length = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    mine: dict[str, list[float]] = {}
    for span in spans:
        mine.setdefault(span.stream, []).append(span.end - span.start)
    return [
        StreamFigures(
            place=place_words(place_of(name), timeline),
            stream=stream_words(name),
            actions=len(mine[name]),
            seconds=sum(mine[name]),
            share=sum(mine[name]) / length if length else 0.0,
        )
        for name in sorted(mine, key=stream_order)
    ]


def visit_words(visit: Visit, timeline: Timeline) -> str:
    """A visit as the picture names it."""
    return f"stage {visit.stage} · {visit.phase.value} · {layer_words(visit.layers, timeline)}"


def seconds_words(seconds: float) -> str:
    """Three digits and a unit: ``1.25 s``, ``38.0 ms``."""
    unit, factor = next(each[1:] for each in _SECONDS if abs(seconds) >= each[0])
    value = seconds * factor
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def bytes_words(size: float) -> str:
    """Decimal units, as sizes of memory are told everywhere else: ``19.1 GB``."""
    least, unit = next((each for each in _BYTES if size >= each[0]), (1.0, "B"))
    value = size / least
    return f"{value:,.1f} {unit}" if unit != "B" and value < 100 else f"{value:,.0f} {unit}"
