from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.output.counting import Counting
from roundpipe.finetune.run.step_log import TIMES, StepLog, StepRecord

if TYPE_CHECKING:
    from roundpipe.finetune.output.progress import StepFigures


class Result:
    """A step under way; tells when it is waited for."""

    def __init__(self, norm: float, events: list[str], *, skipped: bool = False) -> None:
        self._norm, self._events, self.skipped = norm, events, skipped

    @property
    def grad_norm(self) -> float:
        if not self._events or self._events[-1] != f"waits for {self._norm}":
            self._events.append(f"waits for {self._norm}")
        return self._norm


class Place:
    """Stands for folder and progress; keeps what happens in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.records: list[dict[str, Any]] = []

    def append_log(self, record: dict[str, Any]) -> None:
        self.events.append(f"writes {record['step']}")
        self.records.append(record)

    def advance(self, figures: StepFigures) -> None:
        self.events.append(f"shows {figures.step}")

    def record(self, figures: StepFigures) -> None:
        self.events.append(f"records {figures.step}")

    def say(self, text: str) -> None:
        self.events.append(text)


def record_of(step: int, **changes: Any) -> StepRecord:
    given: dict[str, Any] = {
        "step": step,
        "epoch": step / 3,
        "loss": float(step),
        "learning_rate": 0.1,
        "tokens": 100,
        "seconds": 0.5,
    }
    return StepRecord(**{**given, **changes})


def log_of(place: Any, *, total_steps: int = 9, logging_steps: int = 1) -> StepLog:
    log = StepLog(place, total_steps=total_steps, logging_steps=logging_steps)
    log.show_on(place)
    return log


def test_a_steps_norm_is_waited_for_only_when_the_next_step_has_been_given() -> None:
    place = Place()
    log = log_of(place)
    log.add(record_of(1), Result(0.25, place.events))
    assert place.events == ["shows 1"]
    log.add(record_of(2), Result(0.5, place.events))
    assert place.events == ["shows 1", "waits for 0.25", "writes 1", "records 1", "shows 2"]
    log.settle()
    log.settle()
    assert place.events[5:] == ["waits for 0.5", "writes 2", "records 2"]
    assert [record["grad_norm"] for record in place.records] == [0.25, 0.5]


def test_a_record_has_the_names_that_people_know() -> None:
    place = Place()
    log = log_of(place)
    log.add(record_of(1, trained_tokens=40, busy_share=0.97), Result(0.25, place.events))
    log.settle()
    (record,) = place.records
    assert record.pop("host_memory", 1) > 0  # where the system tells it
    assert record == {
        "step": 1,
        "total_steps": 9,
        "epoch": 0.3333,
        "loss": 1.0,
        "grad_norm": 0.25,
        "learning_rate": 0.1,
        "num_tokens": 100,
        "num_trained_tokens": 40,
        "tokens_per_second": 200.0,
        "seconds": 0.5,
        "busy_share": 0.97,
    }
    assert log.history == place.records


def test_tokens_are_those_of_all_steps_and_memory_that_of_the_fullest_device() -> None:
    place = Place()
    devices: Any = [
        SimpleNamespace(peak_bytes=size, torch_device=torch.device("cpu")) for size in (5, 9)
    ]
    log = StepLog(place, total_steps=9, logging_steps=2, devices=devices)  # type: ignore[arg-type]
    for step in range(1, 5):
        log.add(record_of(step, trained_tokens=10), Result(1.0, []))
    log.settle()
    assert [(r["num_tokens"], r["num_trained_tokens"]) for r in place.records] == [
        (200, 20),
        (400, 40),
    ]
    assert [r["device_memory"] for r in place.records] == [9, 9]


def run_log(place: Place, steps: range, log: StepLog | None = None) -> StepLog:
    """Steps of which the third and fourth are skipped, and the fifth has no finite loss."""
    log = log or StepLog(place, total_steps=8, logging_steps=3)  # type: ignore[arg-type]
    for step in steps:
        loss = float("nan") if step == 5 else 1 / step
        skipped = step in (3, 4)
        log.add(record_of(step, loss=loss, trained_tokens=7), Result(1.0, [], skipped=skipped))
    log.settle()
    return log


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_log_that_was_stopped_and_gone_on_with_is_that_of_an_unbroken_run(stop: int) -> None:
    whole, first = Place(), Place()
    expected = run_log(whole, range(1, 9))
    stopped = run_log(first, range(1, stop + 1))
    state = json.loads(json.dumps(stopped.state(), allow_nan=False))
    again = Place()
    resumed = StepLog(again, total_steps=8, logging_steps=3)  # type: ignore[arg-type]
    resumed.restore(state, json.loads(json.dumps(stopped.history)))
    run_log(again, range(stop + 1, 9), resumed)

    def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k not in TIMES} for record in records]

    assert timeless(resumed.history) == timeless(expected.history)
    assert timeless(first.records + again.records) == timeless(whole.records)
    assert resumed.num_skipped == 2
    assert resumed.state() == expected.state()


def test_a_step_that_was_lost_has_no_record_and_no_tokens() -> None:
    class Lost:
        skipped = False

        @property
        def grad_norm(self) -> float:
            raise RoundPipeError("a device's memory did not suffice")

    place = Place()
    log = log_of(place)
    log.add(record_of(1), Result(1.0, place.events))
    log.add(record_of(2), Lost())
    with pytest.raises(RoundPipeError, match="did not suffice"):
        log.settle()
    log.forget(2)
    log.add(record_of(2), Lost())
    log.forget(2)  # before anybody has waited for it
    log.settle()
    log.add(record_of(2), Result(1.0, place.events))
    log.settle()
    assert [(r["step"], r["num_tokens"]) for r in place.records] == [(1, 100), (2, 200)]


def test_records_that_the_disk_did_not_take_are_written_as_soon_as_it_does() -> None:
    class Full(Place):
        is_full = True

        def append_log(self, record: dict[str, Any]) -> None:
            if self.is_full:
                raise OSError("no space left on device")
            super().append_log(record)

    place = Full()
    log = log_of(place)
    for step in (1, 2, 3):
        log.add(record_of(step), Result(1.0, []))
    log.settle()
    said = [event for event in place.events if "cannot be written" in event]
    assert said == ["the log cannot be written for now: no space left on device"]
    place.is_full = False
    log.add(record_of(4), Result(1.0, []))
    log.settle()
    assert [record["step"] for record in place.records] == [1, 2, 3, 4]


def test_loggers_get_every_record_too() -> None:
    given: list[tuple[int, dict[str, Any]]] = []
    place: Any = Place()
    loggers: Any = SimpleNamespace(log=lambda step, record: given.append((step, record)))
    log = StepLog(place, total_steps=9, logging_steps=1, loggers=loggers)
    log.add(record_of(1), Result(1.0, []))
    log.add_evaluation(1, 0.5, 2.0, tokens=30, seconds=1.25)
    assert [step for step, _ in given] == [1, 1]
    assert [record for _, record in given] == place.records
    assert place.records[1] == {
        "step": 1,
        "epoch": 0.5,
        "eval_loss": 2.0,
        "eval_tokens": 30,
        "eval_seconds": 1.25,
    }


def test_an_evaluation_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    log = log_of(place)
    now = iter([0.0, 0.0, 1.0, 4.0, 5.0, 40.0])
    timed = functools.partial(Counting, now=lambda: next(now))
    monkeypatch.setattr("roundpipe.finetune.run.step_log.Counting", timed)
    tell = log.evaluating(200)
    for done in (0, 20, 50, 60, 100):
        tell(done)
    assert place.events == [
        "evaluating: 50/200 samples · 0:12 left",
        "evaluating: 100/200 samples · 0:40 left",
    ]


def test_with_logging_steps_a_record_is_the_mean_of_its_steps_and_none_is_lost() -> None:
    place = Place()
    log = log_of(place, total_steps=5, logging_steps=2)
    for step in range(1, 6):
        log.add(record_of(step, tokens=100 * step), Result(step, place.events))
    log.settle()
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in place.records] == [
        (2, 1.5, 2),
        (4, 3.5, 4),
        (5, 5.0, 5),
    ]
    assert place.records[0]["tokens_per_second"] == 300.0


def test_a_run_that_ends_early_has_a_record_of_its_last_steps_too() -> None:
    place = Place()
    log = log_of(place, total_steps=9, logging_steps=2)
    for step in range(1, 4):
        log.add(record_of(step), Result(step, place.events))
    log.finish()
    log.finish()
    assert [record["step"] for record in place.records] == [2, 3]


def test_an_evaluation_is_written_after_the_step_it_follows() -> None:
    place = Place()
    log = log_of(place)
    log.add(record_of(1), Result(0.25, place.events))
    log.add_evaluation(1, 1 / 3, 2.5)
    assert [("eval_loss" in r, r["step"]) for r in place.records] == [(False, 1), (True, 1)]
    assert place.records[1] == {"step": 1, "epoch": 0.3333, "eval_loss": 2.5}
    assert place.events[-1] == "step 1/9 evaluation loss 2.5"


def test_a_skipped_step_is_told_and_written_without_numbers_that_json_lacks() -> None:
    place = Place()
    log = log_of(place)
    log.add(record_of(1, loss=float("nan")), Result(float("inf"), place.events, skipped=True))
    log.settle()
    assert place.records[0]["loss"] is None
    assert place.records[0]["grad_norm"] is None
    assert place.records[0]["skipped"] is True
    assert "step 1 changed nothing: its loss or gradient is not finite" in place.events


def test_a_scaled_loss_may_be_skipped_more_often_until_its_scale_is_found() -> None:
    place = Place()
    log = StepLog(place, total_steps=99, logging_steps=1, scaled=True)  # type: ignore[arg-type]
    for step in range(1, 22):
        log.add(record_of(step), Result(1.0, place.events, skipped=True))
    with pytest.raises(RoundPipeError, match="no finite gradient for 21 steps"):
        log.settle()


def test_several_skipped_steps_in_a_row_stop_the_run() -> None:
    place = Place()
    log = log_of(place)

    def skip(step: int, *, skipped: bool) -> None:
        log.add(record_of(step), Result(1.0, place.events, skipped=skipped))

    for step in range(1, 5):
        skip(step, skipped=True)
    skip(5, skipped=False)  # the count begins again
    for step in range(6, 11):
        skip(step, skipped=True)
    with pytest.raises(RoundPipeError, match=r"(?s)no finite gradient for 5 steps.*hint: .*1e-02"):
        log.settle()
