from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.plan.timeline import Timeline
from roundpipe.report.timeline_parse import parse_timeline
from roundpipe.report.timeline_record import TimelineRecord, read_record, record_text, shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = {
    "format": "roundpipe timeline",
    "version": 1,
    "title": "a run",
    "devices": ["cpu"],
    "layers": ["block 0"],
    "streams": ["0.compute", "host"],
    "steps": [
        {
            "step": 1,
            "visits": [[0, "fused", 0, 1, 0, [0, 1]]],
            "spans": [[0, "X0.0", 0.0, 1.0], [0, "X0.1", 1.0, 2.0], [1, "S0", 2.0, 2.5]],
        }
    ],
    "counters": {"host.memory": [[0.0, 1], [1.5, 2.5]]},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value replaced; ``steps/0/spans/1/0`` is where."""
    content: dict[str, Any] = json.loads(json.dumps(GOOD))
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place: Any = content
    for part in way:
        place = place[part]
    place[last] = value
    return content


def test_what_is_written_is_read_again(
    record_of: Callable[..., TimelineRecord], tmp_path: Path
) -> None:
    record = record_of(devices=3, steps=3, title="a name </script>\n")
    path = tmp_path / "timeline.json"
    path.write_text(record_text(record))
    again = read_record(path)
    assert again.title == record.title
    assert again.timeline.devices == record.timeline.devices
    assert again.timeline.layers == record.timeline.layers
    for old, new in zip(record.timeline.steps, again.timeline.steps, strict=True):
        assert new.step == old.step
        kept = [
            (v.number, v.stage, v.phase, v.layers, v.device, v.microbatches) for v in old.visits
        ]
        assert kept == [
            (v.number, v.stage, v.phase, v.layers, v.device, v.microbatches) for v in new.visits
        ]
        assert [(s.stream, s.action) for s in old.spans] == [
            (s.stream, s.action) for s in new.spans
        ]
        for was, now in zip(old.spans, new.spans, strict=True):
            assert now.start == pytest.approx(was.start - record.begin, abs=1e-7)
            assert now.end == pytest.approx(was.end - record.begin, abs=1e-7)
    assert again.counters.keys() == record.counters.keys()
    assert record_text(again) == record_text(record)


def test_the_last_whole_steps_are_kept_and_one_at_least(
    record_of: Callable[..., TimelineRecord],
) -> None:
    record = record_of(steps=4)
    sizes = [len(step.spans) for step in record.timeline.steps]
    two = shortened(record, sizes[-1] + sizes[-2] + 1)
    assert [step.step for step in two.timeline.steps] == [6, 7]
    assert all(at >= two.begin for at, _ in two.counters["0.memory"])
    assert 0 < len(two.counters["0.memory"]) < len(record.counters["0.memory"])
    assert [step.step for step in shortened(record, 1).timeline.steps] == [7]
    assert shortened(record).timeline == record.timeline
    assert shortened(TimelineRecord("none", Timeline(()))).timeline.steps == ()


def test_a_whole_file_at_its_bound_has_a_few_megabytes(
    record_of: Callable[..., TimelineRecord],
) -> None:
    record = record_of(devices=4, microbatches=16, steps=4)
    per_span = len(record_text(record)) / len(record.timeline.spans)
    assert per_span * 40_000 < 4e6


def test_a_name_that_cannot_be_written_is_made_one_that_can() -> None:
    title, _, _ = parse_timeline(json.loads(json.dumps(changed("title", "caf\udce9 \u2028"))))
    assert title == "caf? \u2028"


def test_the_good_file_is_good() -> None:
    title, timeline, counters = parse_timeline(GOOD)
    assert title == "a run"
    assert [str(span.action) for span in timeline.spans] == ["X0.0", "X0.1", "S0"]
    assert counters == {"host.memory": ((0.0, 1.0), (1.5, 2.5))}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("format", "pickle", "the file is of another format"),
        ("version", 2, "the file is of another version"),
        ("title", 3, "title: not a name"),
        ("title", "x" * 1000, "title: not a name"),
        ("devices", "cpu", "devices: not a list"),
        ("layers/0", None, "layers: not a name"),
        ("layers", [""] * 20_000, "layers: too long"),
        ("streams/0", "../x", "streams: not a name of one"),
        ("streams/0", "99999.compute", "streams: not a name of one"),
        ("steps", {}, "steps: not a list"),
        ("steps/0", [], "steps[0]: not an object"),
        ("steps/0/step", -1, "steps[0].step: not a count"),
        ("steps/0/step", True, "steps[0].step: not a count"),
        ("steps/0/visits/0/1", "sideways", "steps[0].visits[0]: not a phase"),
        ("steps/0/visits/0/1", [], "steps[0].visits[0]: not a phase"),
        ("steps/0/visits/0/3", 0, "steps[0].visits[0]: no layers"),
        ("steps/0/visits/0/4", 1e400, "steps[0].visits[0]: not a count"),
        ("steps/0/visits/0", [0, "fused"], "steps[0].visits[0]: not 6 values"),
        ("steps/0/visits/0/5/0", "a", "steps[0].visits[0]: not a count"),
        ("steps/0/spans/1/0", 2, "steps[0].spans[1]: there is no such stream"),
        ("steps/0/spans/1/1", "Z0", "steps[0].spans[1]: not an action"),
        ("steps/0/spans/1/1", "X" + "9" * 5000, "steps[0].spans[1]: not an action"),
        ("steps/0/spans/1/1", "X9999999999", "steps[0].spans[1]: not a count"),
        ("steps/0/spans/1/1", "X1.0", "steps[0].spans[1]: there is no such visit"),
        ("steps/0/spans/1/1", "-X0.1", "steps[0].spans[1]: an action of another step"),
        ("steps/0/spans/1/1", "X0.0", "steps[0].spans: an action is there twice"),
        ("steps/0/spans/1/2", 2.5, "steps[0].spans[1]: ends before it starts"),
        ("steps/0/spans/1/2", -1.0, "steps[0].spans[1]: not a number from 0 to 1e+08"),
        ("steps/0/spans/1/3", "2", "steps[0].spans[1]: not a number from 0 to 1e+08"),
        ("steps/0/spans/1/3", float("inf"), "steps[0].spans[1]: not a number from 0 to 1e+08"),
        ("steps/0/spans/1/3", float("nan"), "steps[0].spans[1]: not a number from 0 to 1e+08"),
        ("steps/0/spans/1/3", 10**30, "steps[0].spans[1]: not a number from 0 to 1e+08"),
        ("counters", [], "counters: not an object"),
        ("counters/memory", [], "counters: not a name of one"),
        ("counters/host.memory/0", [0.0], "counters.host.memory: not 2 values"),
        ("counters/host.memory/0/0", 2.0, "counters.host.memory: not in order"),
        ("counters/host.memory/0/1", -1, "counters.host.memory: not a number from 0 to 1e+18"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        parse_timeline(changed(path, value))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[1, 2",
        b"\xff\xfe\x00",
        b'{"format": NaN}',
        b"[" * 100_000,
        b"1" * 5000,
        b"\x80\x04\x95",  # a pickle
    ],
)
def test_a_file_that_is_no_timeline_is_one_paragraph_with_a_hint(
    raw: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"not a timeline that can be read: .*\nhint: ") as caught:
        read_record(path)
    assert str(caught.value).count("\n") == 1


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)  # a hole: takes no room
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        read_record(path)


def test_a_missing_file_says_which_folder_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or directory\nhint: give the folder"):
        read_record(tmp_path / "timeline.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
PLACES = [
    "title devices layers streams steps counters steps/0 steps/0/step steps/0/visits",
    "steps/0/visits/0 steps/0/visits/0/0 steps/0/visits/0/2 steps/0/visits/0/5 steps/0/spans",
    "steps/0/spans/0 steps/0/spans/0/1 steps/0/spans/0/2 counters/host.memory/0",
]


@given(path=st.sampled_from(" ".join(PLACES).split()), value=json_values)
def test_whatever_stands_anywhere_is_refused_or_shown(path: str, value: Any) -> None:
    from roundpipe.report.page import page
    from roundpipe.report.trace import trace_text

    try:
        record = TimelineRecord(*parse_timeline(changed(path, value)))
    except ValueError:
        return
    assert trace_text(record)
    assert page(record)
