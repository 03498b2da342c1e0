"""Draw schedules: as a text grid for messages and tests, as an SVG picture for people.

The grid is a staircase, one row a device, time to the right::

    0.compute  F0.0 F0.1 F0.2      R2.0 B2.0---- R2.1 B2.1---- R2.2 B2.2----
    1.compute       X1.0 X1.1 X1.2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError
from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.clocks import play
from roundpipe.plan.timeline import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roundpipe.plan.schedule import Schedule, Visit


def render(
    schedule: Schedule,
    *,
    width: int = 100,
    seconds: Callable[[Action], float] | None = None,
    arrow: Action | None = None,
) -> str:
    """Return the schedule's compute streams as a grid of lines of at most ``width`` characters.

    Actions take ``seconds``, by default one each and transfers none. What is too long goes on
    below. With ``arrow`` only the lines around that action are drawn, with a mark under it. What a
    schedule in a deadlock cannot run is left out.
    """
    spans = _played(schedule, seconds or _one_each)
    rows = [name for name in schedule.streams if name.endswith(".compute")]
    pointed = next((span for span in spans if span.action == arrow), None)
    if pointed is not None and pointed.stream not in rows:
        rows.append(pointed.stream)
    shown = [span for span in spans if span.stream in rows]
    if not shown:
        return ""
    scale = _scale(shown)
    indent = max(map(len, rows)) + 2
    room = max(width - indent, 12)
    lines = {name: _line([span for span in shown if span.stream == name], scale) for name in rows}
    bands = range(0, max(map(len, lines.values())), room)
    at = None if pointed is None else round(pointed.start * scale)
    out: list[str] = []
    for band in bands if at is None else [at // room * room]:
        if out:
            out.append("")
        for name in rows:
            out.append(f"{name:{indent}}{lines[name][band : band + room]}".rstrip())
            if pointed is not None and at is not None and name == pointed.stream:
                out.append(f"{' ' * (indent + at - band)}^ {arrow}")
    return "\n".join(out) + "\n"


def _one_each(action: Action) -> float:
    return 1.0 if action.op in COMPUTE else 0.0


def _played(schedule: Schedule, seconds: Callable[[Action], float]) -> list[Span]:
    """What runs when, as far as anything can run."""
    home = {action: name for name, action in schedule.actions()}
    spans: list[Span] = []
    try:
        for action, start, end in play(schedule.streams, schedule.waits, seconds):
            spans.append(Span(home[action], action, start, end))
    except DeadlockError:
        pass
    return spans


def _scale(spans: Sequence[Span]) -> float:
    """Characters a second: room for a label in all but the shortest quarter of the actions."""
    wide = max(len(str(span.action)) for span in spans) + 1
    lengths = sorted(span.end - span.start for span in spans if span.end > span.start)
    return wide / lengths[len(lengths) // 4] if lengths else 1.0


def _line(spans: Sequence[Span], scale: float) -> str:
    """One stream: each action's label, drawn out with dashes to its length."""
    line = ""
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        label = str(span.action)[: max(end - start - 1, 0)]
        line = line.ljust(start) + label.ljust(end - start - 1, "-")
    return line


_COLOURS = {
    Op.FORWARD: ("forward", "#4C8BD9"),
    Op.FUSED: ("fused: forward, loss, backward", "#8A63C9"),
    Op.RECOMPUTE: ("recompute", "#C4841D"),
    Op.BACKWARD: ("backward", "#D9694C"),
}
_MOVES = {
    Op.UPLOAD: ("weights up", "#5E8F8A"),
    Op.DOWNLOAD: ("gradients down", "#A8577E"),
    Op.ACTIVATION_IN: ("activations", "#8FA3B5"),
    Op.ACTIVATION_OUT: ("activations", "#8FA3B5"),
    Op.GRADIENT_IN: ("activations", "#8FA3B5"),
    Op.GRADIENT_OUT: ("activations", "#8FA3B5"),
}
_UP = frozenset({Op.UPLOAD, Op.ACTIVATION_IN, Op.GRADIENT_IN})
_STYLE = """<style>
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.word { fill: #3d444d; } .faint { fill: #7a828c; font-size: 11px; }
.lane { fill: #8b949e; fill-opacity: .13; } .line { stroke: #8b949e; stroke-opacity: .6; }
.number { fill: #fff; text-anchor: middle; }
.middle { text-anchor: middle; }
.later { opacity: .55; }
@media (prefers-color-scheme: dark) { .word { fill: #d1d7e0; } .faint { fill: #9198a1; } }
</style>"""


@dataclass(frozen=True)
class _Frame:
    """Where things lie in the picture, in pixels."""

    width: int
    begin: float  # seconds at the left edge
    end: float
    left: int = 74
    right: int = 12
    top: int = 10
    head: int = 18  # the names of visits
    compute: int = 30
    move: int = 6  # one transfer lane
    gap: int = 14

    def x(self, seconds: float) -> float:
        span = max(self.end - self.begin, 1e-12)
        return self.left + (seconds - self.begin) / span * (self.width - self.left - self.right)

    @property
    def row(self) -> int:
        return self.head + self.compute + 2 * (self.move + 2) + self.gap

    def y(self, row: int) -> int:
        return self.top + row * self.row


def render_svg(
    spans: Sequence[Span],
    *,
    visits: Sequence[Visit] = (),
    width: int = 960,
    until: float | None = None,
    caption: str = "",
) -> str:
    """Return an SVG picture: a row a device, blocks that compute, thin lanes of transfers below.

    ``spans`` may be of several steps one after the other, simulated or measured; later steps are
    paler. ``visits`` lets it name the layers of each visit. ``until`` is where the picture ends, in
    seconds: pictures of one ``until`` have one scale. Readable on light and dark ground.
    """
    numbered = [pair for pair in _with_steps(spans) if _is_drawn(pair[1])]
    begin = min((span.start for _, span in numbered), default=0.0)
    last = max((span.end for _, span in numbered), default=1.0)
    frame = _Frame(width, begin, last if until is None else until)
    numbered = [pair for pair in numbered if pair[1].start < frame.end]
    devices = sorted({int(span.stream.split(".")[0]) for _, span in numbered})
    height = frame.y(len(devices)) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{caption}</title>" if caption else "",
        _STYLE,
    ]
    for row, device in enumerate(devices):
        mine = [pair for pair in numbered if pair[1].stream.startswith(f"{device}.")]
        parts += _device(frame, row, device, mine)
        parts += _headings(frame, row, mine, visits)
    parts += _legend(
        frame, frame.y(len(devices)), {span.action.op for _, span in numbered}, caption
    )
    return "\n".join(part for part in (*parts, "</svg>") if part) + "\n"


def _is_drawn(span: Span) -> bool:
    known = span.action.op in _COLOURS or span.action.op in _MOVES
    return known and span.end > span.start


def _with_steps(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with its step: the next begins where an action comes again."""
    step, seen = 0, set[Action]()
    for span in spans:
        if span.action in seen:
            step, seen = step + 1, set()
        seen.add(span.action)
        yield step, span


def _device(
    frame: _Frame, row: int, device: int, spans: Sequence[tuple[int, Span]]
) -> Iterator[str]:
    """The lanes of one device and what runs in them."""
    y = frame.y(row) + frame.head
    up, down = y + frame.compute + 2, y + frame.compute + 4 + frame.move
    x, wide = frame.left, frame.width - frame.left - frame.right
    yield f'<text class="word" x="4" y="{y + 20}">device {device}</text>'
    yield f'<text class="faint" x="4" y="{up + 11}">transfers</text>'
    for top, height in ((y, frame.compute), (up, frame.move), (down, frame.move)):
        yield f'<rect class="lane" x="{x}" y="{top}" width="{wide}" height="{height}" rx="3"/>'
    for step, span in spans:
        op, later = span.action.op, " later" if step else ""
        left = frame.x(span.start)
        size = frame.x(min(span.end, frame.end)) - left
        if op in _MOVES:
            colour, top = _MOVES[op][1], up if op in _UP else down
            box = f'x="{left:.1f}" y="{top}" width="{max(size, 1):.1f}" height="{frame.move}"'
            yield f'<rect class="move{later}" {box} fill="{colour}"/>'
            continue
        box = f'x="{left + 0.5:.1f}" y="{y}" width="{size - 1:.1f}" height="{frame.compute}"'
        yield f'<rect class="work{later}" {box} rx="3" fill="{_COLOURS[op][1]}"/>'
        if size >= 12 and span.action.microbatch is not None:
            middle = f'x="{left + size / 2:.1f}" y="{y + 19}"'
            kind = "word middle" if step else "number"
            yield f'<text class="{kind}" {middle}>{span.action.microbatch}</text>'


def _headings(
    frame: _Frame, row: int, spans: Sequence[tuple[int, Span]], visits: Sequence[Visit]
) -> Iterator[str]:
    """Over each visit the layers it runs."""
    if not visits:
        return
    work = [pair for pair in spans if pair[1].action.op in _COLOURS]
    for (step, number), group in groupby(work, lambda pair: (pair[0], pair[1].action.index)):
        places = [span for _, span in group]
        left, right = frame.x(places[0].start), frame.x(min(places[-1].end, frame.end))
        layers = visits[number].layers
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
        if step:
            name += " · next step"
        if right - left < 6 * len(name):
            continue
        at = f'x="{(left + right) / 2:.1f}" y="{frame.y(row) + frame.head - 5}"'
        yield f'<text class="faint middle" {at}>{name}</text>'


def _legend(frame: _Frame, y: int, ops: set[Op], caption: str) -> Iterator[str]:
    """What the colours mean, and which way time runs."""
    names = dict(pair for table in (_COLOURS, _MOVES) for op, pair in table.items() if op in ops)
    x = frame.left
    for name, colour in names.items():
        yield f'<rect x="{x}" y="{y + 4}" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text class="word" x="{x + 16}" y="{y + 14}">{name}</text>'
        x += 16 + round(6.4 * len(name)) + 18
    if caption:
        yield f'<text class="faint" x="{frame.left}" y="{y + 30}">{caption}</text>'
    end = frame.width - frame.right
    yield f'<text class="faint" x="{end - 8}" y="{y + 30}" text-anchor="end">time →</text>'
