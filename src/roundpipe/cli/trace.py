"""``roundpipe trace``: the timeline of a run as a trace file, or as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.report.page import page
from roundpipe.report.timeline_record import TIMELINE_FILE, read_record
from roundpipe.report.trace import trace_text

if TYPE_CHECKING:
    from roundpipe.report.timeline_record import TimelineRecord

_TRACE_FILE = "trace.json"


def trace(run_dir: str, *, output: str | None, html: str | None) -> int:
    """Write the asked files; a trace into the run's folder where none was asked for.

    ``run_dir``: the folder of a run, or its timeline's file. Raises ConfigError.
    """
    given = Path(run_dir).expanduser()
    if not given.exists():
        raise ConfigError(f"no such folder: {run_dir}\nhint: give the output_dir of a run")
    source = given / TIMELINE_FILE if given.is_dir() else given
    record = read_record(source)
    if not record.timeline.spans:
        raise ConfigError(f"no step was recorded: {source}\nhint: train for a step at least")
    if output is None and html is None:
        output = str(source.with_name(_TRACE_FILE))
    if output is not None:
        _write(output, trace_text(record), source, "--output")
        _say(output, record, "open it at ui.perfetto.dev or chrome://tracing")
    if html is not None:
        _write(html, page(record), source, "--html")
        _say(html, record, "open it in a browser")
    return 0


def _write(target: str, text: str, source: Path, option: str) -> None:
    path = Path(target).expanduser()
    if path.exists() and path.samefile(source):
        raise ConfigError(
            f"would replace the timeline it is made from: {target}\nhint: {option} ANOTHER"
        )
    try:
        write_text(path, text)
    except (OSError, ValueError) as error:  # ValueError: a path that names no file
        reason = (getattr(error, "strerror", None) or "names no file").lower()
        raise ConfigError(f"cannot write: {target}: {reason}\nhint: {option} ANOTHER") from error


def _say(target: str, record: TimelineRecord, how: str) -> None:
    steps = record.timeline.steps
    which = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to "
    which += f"{steps[-1].step}" if len(steps) > 1 else ""
    typer.echo(f"wrote {target}: {which}, {len(record.timeline.spans):,} actions; {how}")
