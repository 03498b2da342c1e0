from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from roundpipe.cli import main
from roundpipe.plan.actions import Action
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline
from roundpipe.report.timeline_record import TIMELINE_FILE, TimelineRecord, record_text

if TYPE_CHECKING:
    from pathlib import Path

VISIT = Visit(0, 0, Phase.FUSED, range(1), 0, (0,))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    steps = tuple(
        StepSpans(number, (VISIT,), (Span("0.compute", Action.parse("X0.0"), number, number + 1),))
        for number in (7, 8)
    )
    record = TimelineRecord("a <run>", Timeline(steps, ("cpu:0",), ("all",)))
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / TIMELINE_FILE).write_text(record_text(record))
    return folder


def test_a_trace_goes_into_the_folder_of_the_run(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run_dir)]) == 0
    trace = json.loads((run_dir / "trace.json").read_text())
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["X0.0", "X0.0"]
    assert capsys.readouterr().out == (
        f"wrote {run_dir}/trace.json: steps 7 to 8, 2 actions; "
        "open it at ui.perfetto.dev or chrome://tracing\n"
    )
    assert sorted(path.name for path in run_dir.iterdir()) == [TIMELINE_FILE, "trace.json"]


def test_a_page_alone_or_both_are_written_where_it_is_said(run_dir: Path, tmp_path: Path) -> None:
    html, trace = tmp_path / "a.html", tmp_path / "b.json"
    assert main(["trace", str(run_dir), "--html", str(html)]) == 0
    assert "<h1>a &lt;run&gt;</h1>" in html.read_text()
    assert not (run_dir / "trace.json").exists()
    timeline = run_dir / TIMELINE_FILE  # the file itself will do
    assert main(["trace", str(timeline), f"--output={trace}", f"--html={html}"]) == 0
    assert json.loads(trace.read_text())["otherData"] == {"title": "a <run>"}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 2
    assert "\n  hint: " in error
    return error


def test_what_cannot_be_read_is_one_paragraph_with_the_way_out(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, tmp_path / "nothing").startswith("no such folder: ")
    assert refused(capsys, tmp_path).startswith("cannot read the timeline: ")
    (run_dir / TIMELINE_FILE).write_text('{"format": "roundpipe timeline", "version": 1, "ste')
    assert refused(capsys, run_dir).startswith("not a timeline that can be read: ")
    assert not (run_dir / "trace.json").exists()


def test_a_run_without_a_step_has_nothing_to_show(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / TIMELINE_FILE).write_text(record_text(TimelineRecord("", Timeline(()))))
    assert refused(capsys, run_dir).startswith("no step was recorded: ")


def test_what_cannot_be_written_is_told_and_the_record_is_never_replaced(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / TIMELINE_FILE).read_bytes()
    missing = tmp_path / "no" / "trace.json"
    assert refused(capsys, run_dir, "--output", missing).startswith("cannot write: ")
    assert refused(capsys, run_dir, "--output", "/").startswith("cannot write: /: is a directory")
    assert refused(capsys, run_dir, "--html", tmp_path).startswith("cannot write: ")
    own = refused(capsys, run_dir, "--html", run_dir / TIMELINE_FILE)
    assert own.startswith("would replace the timeline it is made from: ")
    assert (run_dir / TIMELINE_FILE).read_bytes() == before


def test_it_needs_no_torch(run_dir: Path) -> None:
    code = (
        "import sys; from roundpipe.cli import main; code = main(['trace', sys.argv[1]]); "
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], check=False)
    assert done.returncode == 0
