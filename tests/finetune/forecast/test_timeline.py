"""A plan played action by action: reasons, memory over time, the files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.forecast import Found, pace_of
from roundpipe.finetune.forecast.speed import best_speed
from roundpipe.finetune.forecast.timeline import page_text, played, write_files
from roundpipe.report.forecast import Forecast, Need

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def found(small: ModuleType) -> Found:
    case = small.small_case(batch=8)
    speed = best_speed(case, "round_robin", sizes=[1])
    device, host = speed.device, speed.host
    made = Forecast(
        title="small <b>",
        needs=(Need("gpu", "device memory", device.total, case.device_limit, "head"),),
        bytes={"device": device.total, "pinned_host": host.pinned},
        longest=1000,
        pace=pace_of(speed),
    )
    return Found(made, case, speed)


def test_reasons_add_up(found: Found) -> None:
    reasons = played(found).found.forecast.reasons
    assert reasons is not None
    assert found.speed is not None
    assert sum(reasons.idle.values()) == pytest.approx(1 - found.speed.busy, abs=1e-6)
    assert sum(reasons.critical.values()) == pytest.approx(1)
    assert reasons.ceiling > 0


def test_memory_never_falls_below_nothing_nor_grows_over_what_was_counted(found: Found) -> None:
    counters = played(found).record.counters
    assert set(counters) == {"0.memory", "1.memory", "host.memory"}
    assert found.speed is not None
    for name, points in counters.items():
        sizes = [size for _, size in points]
        assert min(sizes) >= 0
        if name != "host.memory":
            assert sizes[-1] == 0
            assert max(sizes) <= found.speed.device.total * 1.5
    host = [size for _, size in counters["host.memory"]]
    assert max(host) <= found.speed.host.total
    assert max(host) > found.speed.host.total - found.speed.host.saved_inputs


def test_files_are_written(found: Found, tmp_path: Path) -> None:
    said: list[str] = []
    trace, html = tmp_path / "t.json", tmp_path / "p.html"
    write_files(played(found), trace=trace, html=html, say=said.append)
    assert json.loads(trace.read_text())["traceEvents"]
    text = html.read_text()
    assert "small &lt;b&gt;" in text
    assert "Schedules compared" in text
    assert [line.partition(":")[0] for line in said] == [f"wrote {trace}", f"wrote {html}"]


def test_a_file_that_cannot_be_written_is_an_error(found: Found, tmp_path: Path) -> None:
    steps = played(found)
    with pytest.raises(ConfigError, match=r"cannot write: .*no such file or directory"):
        write_files(steps, trace=tmp_path / "no" / "t.json", html=None, say=print)


def test_the_page_marks_the_critical_path(found: Found) -> None:
    steps = played(found)
    assert steps.critical
    assert set(steps.critical) & set(steps.record.timeline.spans)
    assert page_text(steps).startswith("<!doctype html>")
