from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.run.recorder import TimelineRecorder
from roundpipe.plan.actions import Action
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline
from roundpipe.report.timeline_record import TIMELINE_FILE, read_record

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

VISIT = Visit(0, 0, Phase.FUSED, range(1), 0, (0,))


def step(number: int, at: float) -> StepSpans:
    spans = (Span("0.compute", Action.parse("X0.0"), at, at + 1),)
    return StepSpans(number, (VISIT,), spans)


def recorder(timeline: object) -> tuple[TimelineRecorder, Any]:
    trainer: Any = SimpleNamespace(timeline=timeline)
    device: Any = SimpleNamespace(allocated_bytes=1000)
    return TimelineRecorder(trainer, [device], title="what is trained"), trainer


def folder(path: Path) -> Any:
    return SimpleNamespace(path=path)


def test_what_was_taken_is_written_and_steps_count_from_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    kept, trainer = recorder(Timeline((step(0, 100.0), step(1, 101.0)), ("cpu:0",), ("layer",)))
    kept.sample()
    now[0] = 101.5
    kept.sample()
    kept.take()
    trainer.timeline = Timeline(())  # a failed step is forgotten by what comes after it
    kept.write(folder(tmp_path))
    record = read_record(tmp_path / TIMELINE_FILE)
    assert record.title == "what is trained"
    assert [s.step for s in record.timeline.steps] == [1, 2]
    assert record.timeline.devices == ("cpu:0",)
    assert [(s.start, s.end) for s in record.timeline.spans] == [(0.0, 1.0), (1.0, 2.0)]
    assert record.counters["0.memory"] == ((0.0, 1000.0), (1.5, 1000.0))
    assert set(record.counters) <= {"0.memory", "host.memory"}  # the host's where it is known


def test_nothing_is_written_before_a_step(tmp_path: Path) -> None:
    kept, _ = recorder(Timeline(()))
    kept.write(folder(tmp_path))
    kept.take()
    kept.write(folder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_that_cannot_be_told_or_written_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @property
        def timeline(self) -> Timeline:
            raise RuntimeError("the card is gone")

    broken: Any = Broken()
    kept = TimelineRecorder(broken, [], title="")
    with caplog.at_level(logging.WARNING):
        kept.take()
        kept.write(folder(tmp_path))
    assert "what ran when cannot be told" in caplog.text
    good, _ = recorder(Timeline((step(0, 1.0),)))
    good.take()
    with caplog.at_level(logging.WARNING):
        good.write(folder(tmp_path / "not there"))
    assert "timeline.json was not written: " in caplog.text
