"""From the content of a timeline's file, which anybody may have written, to a timeline.

Each value is checked for its type, its range and what it refers to; lists have a longest length.
Raises ValueError that names the place, and nothing else.
"""

from __future__ import annotations

import re
from typing import Any

from roundpipe.plan.actions import OF_LAYERS, Action, is_action
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline

FORMAT = "roundpipe timeline"
VERSION = 1
_STREAM = re.compile(r"([0-9]{1,4}\.)?[a-z_]{1,40}")
_COUNTER = re.compile(r"([0-9]{1,4}|host)\.[a-z_]{1,40}")
_PHASES = {phase.value: phase for phase in Phase}
_MOST_STEPS = 10_000
_MOST_SPANS = 500_000  # of the whole file
_MOST_ENTRIES = 10_000  # devices, streams, layers, visits, microbatches
_MOST_POINTS = 200_000
_LONGEST_NAME = 400
_LONGEST_ACTION = 40
_MOST_SECONDS = 1e8
_MOST_BYTES = 1e18

Counters = dict[str, tuple[tuple[float, float], ...]]


def parse_timeline(content: Any) -> tuple[str, Timeline, Counters]:
    """Return title, timeline and counters of a file's content as JSON gives it."""
    content = _object(content, "the file")
    if content.get("format") != FORMAT:
        raise ValueError("the file is of another format")
    if content.get("version") != VERSION:
        raise ValueError("the file is of another version")
    layers = _names(content.get("layers"), "layers")
    devices = _names(content.get("devices"), "devices")
    streams = [
        _matching(name, _STREAM, "streams") for name in _list(content.get("streams"), "streams")
    ]
    steps = []
    room = _MOST_SPANS
    for at, step in enumerate(_list(content.get("steps"), "steps", _MOST_STEPS)):
        steps.append(_step(step, f"steps[{at}]", streams, room))
        room -= len(steps[-1].spans)
    timeline = Timeline(tuple(steps), devices, layers)
    counters = _counters(content.get("counters", {}))
    return _name(content.get("title"), "title"), timeline, counters


def _step(content: Any, where: str, streams: list[str], room: int) -> StepSpans:
    content = _object(content, where)
    visits = tuple(
        _visit(visit, number, f"{where}.visits[{number}]")
        for number, visit in enumerate(_list(content.get("visits"), f"{where}.visits"))
    )
    spans = tuple(
        _span(span, f"{where}.spans[{at}]", streams, visits)
        for at, span in enumerate(_list(content.get("spans"), f"{where}.spans", room))
    )
    seen = {span.action for span in spans}
    if len(seen) < len(spans):
        raise ValueError(f"{where}.spans: an action is there twice")
    return StepSpans(_count(content.get("step"), f"{where}.step"), visits, spans)


def _visit(content: Any, number: int, where: str) -> Visit:
    stage, phase, first, stop, device, microbatches = _fields(content, 6, where)
    first, stop = _count(first, where), _count(stop, where)
    if not first < stop:
        raise ValueError(f"{where}: no layers")
    if not isinstance(phase, str) or phase not in _PHASES:
        raise ValueError(f"{where}: not a phase")
    return Visit(
        number,
        stage=_count(stage, where),
        phase=_PHASES[phase],
        layers=range(first, stop),
        device=_count(device, where),
        microbatches=tuple(_count(each, where) for each in _list(microbatches, where)),
    )


def _span(content: Any, where: str, streams: list[str], visits: tuple[Visit, ...]) -> Span:
    stream, text, start, end = _fields(content, 4, where)
    if _count(stream, where) >= len(streams):
        raise ValueError(f"{where}: there is no such stream")
    if not isinstance(text, str) or len(text) > _LONGEST_ACTION or not is_action(text):
        raise ValueError(f"{where}: not an action")
    action = Action.parse(text)
    for part in (action.index, action.microbatch or 0, action.chunk or 0):
        _count(part, where)
    if action.before:
        raise ValueError(f"{where}: an action of another step")
    if action.op not in OF_LAYERS and action.index >= len(visits):
        raise ValueError(f"{where}: there is no such visit")
    start, end = _number(start, where, _MOST_SECONDS), _number(end, where, _MOST_SECONDS)
    if end < start:
        raise ValueError(f"{where}: ends before it starts")
    return Span(streams[stream], action, start, end)


def _counters(content: Any) -> Counters:
    counters: Counters = {}
    for name, points in _object(content, "counters").items():
        where = f"counters.{_matching(name, _COUNTER, 'counters')}"
        found = []
        for point in _list(points, where, _MOST_POINTS):
            seconds, value = _fields(point, 2, where)
            found.append(
                (_number(seconds, where, _MOST_SECONDS), _number(value, where, _MOST_BYTES))
            )
        if found != sorted(found, key=lambda pair: pair[0]):
            raise ValueError(f"{where}: not in order")
        counters[name] = tuple(found)
    return counters


def _names(content: Any, where: str) -> tuple[str, ...]:
    return tuple(_name(each, where) for each in _list(content, where))


def _name(content: Any, where: str) -> str:
    if not isinstance(content, str) or len(content) > _LONGEST_NAME:
        raise ValueError(f"{where}: not a name")
    return content.encode("utf-8", "replace").decode("utf-8")  # halves of letters come in pathnames


def _matching(content: Any, pattern: re.Pattern[str], where: str) -> str:
    if not isinstance(content, str) or pattern.fullmatch(content) is None:
        raise ValueError(f"{where}: not a name of one")
    return content


def _object(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: not an object")  # noqa: TRY004 - a value of a file
    return content


def _list(content: Any, where: str, most: int = _MOST_ENTRIES) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"{where}: not a list")  # noqa: TRY004 - a value of a file
    if len(content) > most:
        raise ValueError(f"{where}: too long")
    return content


def _fields(content: Any, count: int, where: str) -> list[Any]:
    if len(_list(content, where)) != count:
        raise ValueError(f"{where}: not {count} values")
    return list(content)


def _number(content: Any, where: str, most: float) -> float:
    is_number = isinstance(content, int | float) and not isinstance(content, bool)
    if not is_number or not 0 <= content <= most:  # an infinity and NaN are out of the range too
        raise ValueError(f"{where}: not a number from 0 to {most:.0e}")
    return float(content)


def _count(content: Any, where: str) -> int:
    if not isinstance(content, int) or isinstance(content, bool) or not 0 <= content <= 10**9:
        raise ValueError(f"{where}: not a count")
    return content
