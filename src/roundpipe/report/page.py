"""One HTML page with tables, the stages, and the timeline of every stream, to zoom and to pan.

The page is one file and loads nothing: script and style stand in it, and a content policy with
their hashes lets nothing else run. What is shown comes as data, never as code, and every text is
escaped where it enters. Words come first: whoever cannot see the picture has the same in tables.

The script draws all on one canvas (``page.js``), because 20,000 elements of a document are slow to
move and as many rectangles are not.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from roundpipe.report.drawing import drawing_data
from roundpipe.report.figures import (
    StageFigures,
    bytes_words,
    seconds_words,
    stage_figures,
    stream_figures,
)
from roundpipe.report.looks import LOOKS, place_of, place_words, stream_order, stream_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from roundpipe.plan.actions import Op
    from roundpipe.plan.timeline import Span
    from roundpipe.report.timeline_record import TimelineRecord

_BAR_WIDTH = 260  # of the longest stage, in the units of its drawing
_NOT_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@dataclass(frozen=True)
class Table:
    """A table of texts; cells that begin with a digit are set to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(
    record: TimelineRecord,
    *,
    lines: Sequence[str] = (),
    tables: Sequence[Table] = (),
    limits: Mapping[str, float] | None = None,
    critical: Collection[Span] = (),
) -> str:
    """Return the text of a page that shows ``record``.

    ``lines`` stand under the title, ``tables`` before all else. ``limits``: bytes by the name of a
    counter, drawn as a line. ``critical``: spans of the record that the page can bring out.
    """
    style, script = _asset("page.css") + _colours(), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(drawing_data(record, limits or {}, critical), allow_nan=False)
    body = [
        f"<h1>{escape(record.title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        *(_table(table) for table in tables),
        _stages(stage_figures(record.timeline)),
        _picture(record, has_critical=bool(critical)),
        _table(_streams(record)),
        _table(_memory(record, limits or {})),
    ]
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(record.title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            *(part for part in body if part),
            "</main>",
            f'<script type="application/json" id="data">{_inert(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _asset(name: str) -> str:
    return files("roundpipe.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _inert(data: str) -> str:
    """JSON that ends no element and begins none, whatever its texts say."""
    return "".join(_NOT_IN_SCRIPT.get(letter, letter) for letter in data)


def _colours() -> str:
    def rules(of: str) -> str:
        values = ((op, getattr(look, of)) for op, look in LOOKS.items())
        return " ".join(f"{_variable(op)}: {value};" for op, value in values)

    fills = "\n".join(
        f".op-{_code(op)} {{ fill: var({_variable(op)}); background: var({_variable(op)}); }}"
        for op in LOOKS
    )
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {rules('dark')} }} }}"
    return f":root {{ {rules('light')} }}\n{dark}\n{fills}\n"


def _code(op: Op) -> str:
    """Tells ``A`` from ``a`` where case does not count."""
    return op.name.lower().replace("_", "-")


def _variable(op: Op) -> str:
    return f"--{_code(op)}"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<div class="wide"><table><caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    kind = ' class="number"' if text[:1].isdigit() else ""
    return f"<td{kind}>{escape(text)}</td>"


def _stages(stages: Sequence[StageFigures]) -> str:
    """The stages as a table whose last column is a bar of each one's time."""
    if not stages:
        return ""
    longest = max(stage.total for stage in stages) or 1.0
    rows = [
        f"<tr>{_cell_of_name(stage.name)}{_cell_of_name(stage.layers)}{_cell(stage.devices)}"
        f"{_cell(seconds_words(stage.total))}<td>{_bar(stage, longest)}</td></tr>"
        for stage in stages
    ]
    columns = ("stage", "layers", "devices", "one microbatch", "")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    legend = _legend({op for stage in stages for op in stage.seconds})
    return (
        '<div class="wide"><table id="stages"><caption>Stages</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody></table>\n"
        f"{legend}</div>"
    )


def _cell_of_name(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _bar(stage: StageFigures, longest: float) -> str:
    parts, at = [], 0.0
    words = [f"{LOOKS[op].words} {seconds_words(value)}" for op, value in stage.seconds.items()]
    for op in (op for op in LOOKS if op in stage.seconds):
        width = stage.seconds[op] / longest * _BAR_WIDTH
        parts.append(f'<rect class="op-{_code(op)}" x="{at:.2f}" width="{width:.2f}" height="12"/>')
        at += width
    label = escape(", ".join(words), quote=True)
    return (
        f'<svg class="bar" role="img" aria-label="{label}" viewBox="0 0 {_BAR_WIDTH} 12" '
        f'width="{_BAR_WIDTH}" height="12">{"".join(parts)}</svg>'
    )


def _legend(ops: Iterable[Op]) -> str:
    shown = set(ops)
    items = "".join(
        f'<li><span class="dot op-{_code(op)}"></span>{escape(look.words)}</li>'
        for op, look in LOOKS.items()
        if op in shown
    )
    return f'<ul class="legend">{items}</ul>'


def _picture(record: TimelineRecord, *, has_critical: bool) -> str:
    timeline = record.timeline
    count = len(timeline.spans)
    if not count:
        return ""
    first, last = timeline.steps[0].step, timeline.steps[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    label = (
        f"Timeline of {steps}: {count:,} actions in {seconds_words(record.end - record.begin)}; "
        "the tables on this page say the same in numbers"
    )
    path = (
        '<button type="button" id="critical" aria-pressed="false">critical path</button>'
        if has_critical
        else ""
    )
    return f"""<section id="picture">
<h2>Timeline</h2>
<p id="how">{escape(label)}. Drag to pan; Ctrl and wheel, or + and -, to zoom; 0 shows all.</p>
<div class="tools">
<button type="button" id="closer" aria-label="zoom in">+</button>
<button type="button" id="farther" aria-label="zoom out">–</button>
<button type="button" id="all">all</button>
{path}
<output id="reading" aria-live="polite"></output>
</div>
<div id="stand"><canvas id="timeline" tabindex="0" role="img" aria-label="{escape(label)}"
aria-describedby="how"></canvas><div id="tip" hidden></div></div>
{_legend(span.action.op for span in timeline.spans)}
</section>"""


def _streams(record: TimelineRecord) -> Table:
    return Table(
        "What each stream did",
        ("where", "stream", "actions", "busy", "share of the time"),
        [
            (
                figures.place,
                figures.stream,
                f"{figures.actions:,}",
                seconds_words(figures.seconds),
                f"{figures.share * 100:.1f} %",
            )
            for figures in stream_figures(record.timeline)
        ],
    )


def _memory(record: TimelineRecord, limits: Mapping[str, float]) -> Table:
    rows = []
    for name in sorted(record.counters, key=stream_order):
        values = [value for _, value in record.counters[name]]
        if values:
            limit = bytes_words(limits[name]) if name in limits else "–"
            most, least = bytes_words(max(values)), bytes_words(min(values))
            place = place_words(place_of(name), record.timeline)
            rows.append((place, stream_words(name), most, least, limit))
    return Table("Memory", ("where", "what", "most", "least", "limit"), rows)
