"""What `roundpipe plan` shows, as lines: one screen, figures in columns, the verdict last."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.report.forecast import Cell, Duration, Forecast, ModelTable, Pace, Reasons

_LABEL = 15  # columns of a line's first word
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def forecast_lines(forecast: Forecast, *, why: bool = False) -> list[str]:
    """The lines; ``why`` adds stages, schedules, bubble and critical path."""
    lines = [*(f"· {note}" for note in forecast.notes), forecast.title, ""]
    lines += [*_needs(forecast), ""]
    pace = forecast.pace
    if pace is not None:
        lines.append(_line("speed", _speed(pace)))
        lines.append(_line("plan", _plan(pace)))
    if forecast.duration is not None:
        lines.append(_line("your job", _duration(forecast.duration)))
    lines.append(_line("longest", _longest(forecast)))
    if why and pace is not None:
        lines += ["", *_why(pace, forecast.reasons)]
    return lines + _verdict(forecast)


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}".rstrip()


def _needs(forecast: Forecast) -> list[str]:
    lines = [_line("", f"{'needs':<11}has")]
    for need in forecast.needs:
        has = "?" if need.has is None else write_bytes(need.has)
        word = "?" if need.has is None else "ok" if need.fits else "no"
        lines.append(
            _line(need.place, f"{write_bytes(need.needs):<11}{has:<11}{word:<10}{need.largest}")
        )
    return lines


def _speed(pace: Pace) -> str:
    return (
        f"{number(pace.tokens_per_second)} tokens/s · {seconds_text(pace.step_seconds)} per step · "
        f"busy {pace.busy * 100:.0f} % · bound by {pace.bound}"
    )


def _plan(pace: Pace) -> str:
    rounds = f" in {pace.rounds} rounds" if pace.rounds > 1 else ""
    return (
        f"{counted(pace.microbatches, 'microbatch', 'microbatches')}{rounds}: "
        f"micro_batch_size={pace.micro_batch_size} · {pace.schedule.replace('_', '-')}, "
        f"{counted(len(pace.stages_forward), 'stage', 'stages')} forward, "
        f"{1 + len(pace.stages_backward)} backward"
    )


def _duration(duration: Duration) -> str:
    note = f" ({duration.note})" if duration.note else ""
    return (
        f"{counted(duration.steps, 'step', 'steps')} · {duration.what} · "
        f"{duration_text(duration.seconds)}{note}"
    )


def _longest(forecast: Forecast) -> str:
    if forecast.longest < 1:
        return "no sequence fits"
    text = f"{forecast.longest:,} tokens at one sequence per microbatch"
    known = forecast.longest_known
    if known is not None and forecast.longest > known:
        text += f" (the model was made for {known:,})"
    return text


def _verdict(forecast: Forecast) -> list[str]:
    lines = []
    lacking = [need for need in forecast.needs if not need.fits]
    if lacking:
        what = " · ".join(f"{need.name}, {_of(need.needs, need.has or 0)}" for need in lacking)
        lines.append(f"does not fit: {what}")
    if forecast.problem:
        lines.append(f"does not fit: {forecast.problem}")
    if forecast.hints:
        lines.append(f"  hint: {', or '.join(map(str, forecast.hints))}")
    return lines


def _of(needs: int, has: int) -> str:
    """``524 of 512 GB``: one unit where both have the same."""
    short, unit = write_bytes(needs).split(" ")
    all_of_it = write_bytes(has)
    if all_of_it.endswith(f" {unit}") and short == all_of_it.split(" ")[0]:  # three digits hide it
        return f"{needs / 1e9:,.2f} of {has / 1e9:,.2f} GB"
    return f"{short if all_of_it.endswith(f' {unit}') else f'{short} {unit}'} of {all_of_it}"


def _why(pace: Pace, reasons: Reasons | None) -> list[str]:
    lines = [
        _line("stages", f"forward   {_stages(pace.stages_forward)}"),
        _line("", f"fused     {_stages((pace.stages_fused,))}: forward, loss and backward in one"),
        _line("", f"backward  {_stages(pace.stages_backward)}"),
        _line("", f"(0 is the embedding, {pace.stages_fused[-1]} the head){_copies(pace)}"),
    ]
    if pace.alternatives:
        compared = [(pace.schedule, pace.step_seconds), *pace.alternatives]
        shown = [_compared(name, seconds, pace.step_seconds) for name, seconds in compared]
        lines.append(_line("schedules", " · ".join(shown)))
    bubble = f"{100 * (1 - pace.busy):.1f} % of device time"
    if reasons is None:
        return [*lines, _line("bubble", bubble), ""]
    idle = _parts(reasons.idle)
    return [
        *lines,
        _line("bubble", f"{bubble}{f', waiting for {idle}' if idle else ''}"),
        _line("critical path", _parts(reasons.critical)),
        _line(
            "ceiling",
            f"{number(reasons.ceiling)} tokens/s: all work, with full recompute, without a wait",
        ),
        "",
    ]


def _copies(pace: Pace) -> str:
    if len(set(pace.replicas)) == 1:
        count = pace.replicas[0]
        return f"; every stage on {count} devices at once" if count > 1 else ""
    on = "forward {}, fused {}, backward {}".format(*pace.replicas)
    return f"; devices at once: {on}"


def _compared(name: str, seconds: float, best: float) -> str:
    more = f" (+{100 * (seconds / best - 1):.0f} %)" if seconds > best * 1.005 else ""
    return f"{name.replace('_', '-')} {seconds_text(seconds)}{more}"


def _stages(stages: Sequence[range]) -> str:
    """Layers by number; stages that are alike in one word: ``0–31 as 8 × 4``."""
    if not stages:
        return "none"
    parts = []
    for size, group in groupby(stages, key=len):
        held = list(group)
        first = min(stage[0] for stage in held)
        last = max(stage[-1] for stage in held)
        span = f"{first}" if first == last else f"{first}–{last}"
        parts.append(span if len(held) == 1 else f"{span} as {len(held)} × {size}")
    layers = "layer" if len(parts) == 1 and "–" not in parts[0] else "layers"
    return f"{layers} {', '.join(parts)}"


def _parts(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {100 * share:.1f} %" for name, share in ordered if share >= 0.0005)


def table_lines(table: ModelTable) -> list[str]:
    """The table of what a machine can train."""
    cells = [[_cell(cell) for cell in row] for _, row in table.rows]
    width = max([len(name) for name, _ in table.rows] + [5])
    widths = [
        max(len(method), *(len(row[at]) for row in cells)) if cells else len(method)
        for at, method in enumerate(table.methods)
    ]
    lines = [f"· {note}" for note in table.notes]
    lines += [table.machine, ""]
    heads = "   ".join(f"{method:<{w}}" for method, w in zip(table.methods, widths, strict=True))
    lines.append(f"  {'':<{width}}   {heads}".rstrip())
    for (name, _), row in zip(table.rows, cells, strict=True):
        text = "   ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))
        lines.append(f"  {name:<{width}}   {text}".rstrip())
    lines += [
        "",
        f"longest sequence · tokens/s at {table.length:,} tokens (or the longest), roughly; "
        "+ is what is missing",
        "  hint: roundpipe plan model=NAME says it in full, for one of them or any other",
    ]
    return lines


def _cell(cell: Cell) -> str:
    if cell.missing:
        return " ".join(f"+{write_bytes(size)} {place}" for place, size in cell.missing[:1])
    return f"{short_length(cell.longest)} · {number(cell.tokens_per_second)}"


def short_length(tokens: int) -> str:
    """``9.8k`` of 9807 tokens."""
    if tokens < 1000:
        return str(tokens)
    thousands = tokens / 1000
    return f"{thousands:.1f}k" if thousands < 10 else f"{thousands:,.0f}k"


def number(value: float) -> str:
    """Three digits, with thousands set apart: ``4,870``."""
    if value >= 1000:
        digits = 10 ** max(len(str(int(value))) - 3, 0)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def counted(count: int, one: str, many: str) -> str:
    """``1 step``, ``1,240 steps``."""
    return f"{count:,} {one if count == 1 else many}"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: ``53.8 s``, ``910 ms``."""
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def duration_text(seconds: float) -> str:
    """Two units: ``18 h 30 min``; no more than is known."""
    left = max(round(seconds), 1)
    for at, (size, unit) in enumerate(_UNITS):
        if left >= size or size == 1:
            count, rest = divmod(left, size)
            if at + 1 == len(_UNITS):
                return f"{count} {unit}"
            small, small_unit = _UNITS[at + 1]
            behind = rest // small
            return f"{count} {unit} {behind} {small_unit}" if behind else f"{count} {unit}"
    raise AssertionError("every number of seconds is at least one")
