from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.run.step_log import StepLog, StepRecord

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
    log.add(record_of(1), Result(0.25, place.events))
    log.settle()
    assert place.records == [
        {
            "step": 1,
            "total_steps": 9,
            "epoch": 0.3333,
            "loss": 1.0,
            "grad_norm": 0.25,
            "learning_rate": 0.1,
            "tokens_per_second": 200.0,
            "seconds": 0.5,
        }
    ]
    assert log.history == place.records


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
