"""The rules are those of the Trace Event Format, as trace viewers read it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.actions import Action
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline
from roundpipe.report.timeline_record import TimelineRecord
from roundpipe.report.trace import trace_text

if TYPE_CHECKING:
    from collections.abc import Callable

Event = dict[str, Any]
FIELDS = {
    "X": {"name", "cat", "cname", "ts", "dur", "args"},
    "M": {"name", "args", "ts"},
    "C": {"name", "ts", "args"},
    "s": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}


def events_of(record: TimelineRecord) -> list[Event]:
    trace = json.loads(trace_text(record), parse_constant=pytest.fail)
    assert trace["displayTimeUnit"] == "ms"
    events: list[Event] = trace["traceEvents"]
    return events


def check_format(events: list[Event]) -> None:
    """Assert what a viewer relies on."""
    for event in events:
        assert set(event) == FIELDS[event["ph"]] | {"ph", "pid", "tid"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    check_spans([event for event in events if event["ph"] == "X"])
    check_names(events)
    check_arrows(events)
    for event in events:
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def check_spans(spans: list[Event]) -> None:
    """On one thread spans may touch, never overlap."""
    ends: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda span: (span["ts"], span["dur"])):
        thread = (span["pid"], span["tid"])
        assert span["dur"] >= 0
        assert round(span["ts"] * 1e3) >= ends.get(thread, 0)
        ends[thread] = round((span["ts"] + span["dur"]) * 1e3)


def check_names(events: list[Event]) -> None:
    """Every process and thread has one name and one place."""
    told = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(set(told)) == len(told)
    for event in events:
        if event["ph"] != "M":
            assert ("process_name", event["pid"], 0) in told
            assert ("process_sort_index", event["pid"], 0) in told
        if event["ph"] == "X":
            assert ("thread_name", event["pid"], event["tid"]) in told
            assert ("thread_sort_index", event["pid"], event["tid"]) in told


def check_arrows(events: list[Event]) -> None:
    """Each arrow begins and ends once, forward in time, where a span begins."""
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event in (start, end):
            assert (event["pid"], event["tid"], event["ts"]) in begins


def test_a_trace_keeps_the_rules_of_its_format(record_of: Callable[..., TimelineRecord]) -> None:
    record = record_of(devices=3, microbatches=4, steps=3)
    events = events_of(record)
    check_format(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(record.timeline.spans)
    assert {event["ph"] for event in events} == set(FIELDS)


@pytest.mark.parametrize(
    "broken",
    [
        {"dur": 1e9},  # runs into the next of its thread
        {"tid": 99},  # a thread without a name
        {"ts": -1.0},
        {"ts": float("nan")},
        {"pid": "one"},
        {"extra": 1},
    ],
)
def test_the_rules_notice_what_is_broken(
    broken: Event, record_of: Callable[..., TimelineRecord]
) -> None:
    events = events_of(record_of())
    next(event for event in events if event["ph"] == "X").update(broken)
    with pytest.raises(AssertionError):
        check_format(events)


def test_a_span_says_what_it_is_and_where(record_of: Callable[..., TimelineRecord]) -> None:
    record = record_of(devices=2)
    events = events_of(record)
    span = next(e for e in events if e["name"] == "B3.1")
    assert span["cat"] == span["args"]["op"] == "backward"
    assert span["args"] == {
        "op": "backward",
        "step": 4,
        "layers": "layers 2–4 (block 2 to block 4)",
        "visit": 3,
        "stage": 3,
        "microbatch": 1,
    }
    names = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    assert names[span["pid"], span["tid"]] == {"name": "compute"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    device = record.timeline.steps[0].visits[3].device
    assert processes[span["pid"]] == f"device {device} (a card)"
    assert sorted(processes.values()) == ["device 0 (a card)", "device 1 (a card)", "host"]
    update = next(e for e in events if e["name"] == "S5")
    assert update["args"] == {"op": "optimizer update", "step": 4, "layers": "layer 5 (block 5)"}
    assert processes[update["pid"]] == "host"


def test_spans_of_one_kind_have_one_colour(record_of: Callable[..., TimelineRecord]) -> None:
    spans = [e for e in events_of(record_of()) if e["ph"] == "X"]
    assert len({(e["name"][0], e["cname"]) for e in spans}) == len({e["name"][0] for e in spans})


def test_arrows_follow_a_microbatch_down_and_up_again(
    record_of: Callable[..., TimelineRecord],
) -> None:
    record = record_of(steps=1, microbatches=2)
    events = events_of(record)
    at = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ways: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            ways.setdefault(event["id"], []).append(at[event["pid"], event["tid"], event["ts"]])
    expected = [["F0", "F1"], ["F1", "X2"], ["X2", "B3"], ["B3", "B4"]]
    assert sorted(ways.values()) == sorted(
        [f"{made}.{m}", f"{used}.{m}"] for made, used in expected for m in range(2)
    )


def test_memory_is_a_counter_of_its_place(record_of: Callable[..., TimelineRecord]) -> None:
    record = record_of()
    counters = [event for event in events_of(record) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory"}
    assert len({event["pid"] for event in counters}) == 2
    assert sum(len(points) for points in record.counters.values()) == len(counters)
    assert counters[0]["args"] == {"bytes": 1e9}


def test_spans_that_touch_still_touch_and_clocks_that_disagree_do_not_overlap() -> None:
    visit = Visit(0, 0, Phase.FORWARD, range(1), 0, tuple(range(4)))
    ends = [1000.1, 1000.1 + 1 / 3, 1000.1 + 2 / 3, 1001.1]
    times = [*zip([1000.0, *ends], ends, strict=False)]
    times[2] = (times[2][0] - 2e-6, times[2][1])  # a card's clock is good to microseconds
    spans = tuple(
        Span("0.compute", Action.parse(f"F0.{m}"), start, end)
        for m, (start, end) in enumerate(times)
    )
    record = TimelineRecord("far from zero", Timeline((StepSpans(0, (visit,), spans),)))
    events = events_of(record)
    check_format(events)
    shown = [event for event in events if event["ph"] == "X"]
    assert shown[0]["ts"] == 0
    for one, next_one in pairwise(shown):
        assert one["ts"] + one["dur"] == pytest.approx(next_one["ts"], abs=1e-6)


def test_a_hostile_title_is_data() -> None:
    record = TimelineRecord('"}]\n\x00', Timeline(()))
    assert json.loads(trace_text(record))["otherData"] == {"title": '"}]\n\x00'}
