from __future__ import annotations

from typing import Any

import pytest

from roundpipe.finetune.run.due import Due, step_count


def steps_that(question: str, config: Any, *, total: int = 10, per_epoch: int = 4) -> list[int]:
    due = Due(config, total, per_epoch, clock=lambda: 0.0)
    return [step for step in range(total + 1) if getattr(due, question)(step)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"val_size": 2}, [4, 8, 10]),
        ({"val_size": 2, "eval_steps": 3}, [3, 6, 9, 10]),
        ({"val_size": 2, "eval_steps": 0.25}, [3, 6, 9, 10]),
        ({"val_size": 2, "eval_strategy": "no"}, []),
    ],
)
def test_evaluations_come_as_asked_and_at_the_end(
    config_of: Any, changes: dict[str, Any], expected: list[int]
) -> None:
    assert steps_that("is_evaluation_due", config_of(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"save_steps": 4}, [4, 8]),
        ({"save_steps": 0.5}, [5, 10]),
        ({"save_strategy": "epoch"}, [4, 8]),
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "best", "val_size": 2}, []),
    ],
)
def test_saves_come_as_asked(config_of: Any, changes: dict[str, Any], expected: list[int]) -> None:
    assert steps_that("is_saving_due", config_of(**changes)) == expected


def test_minutes_are_counted_from_the_last_save(config_of: Any) -> None:
    now = [1000.0]
    due = Due(config_of(save_minutes=2), 10, 4, clock=lambda: now[0])
    found = []
    for step in range(1, 9):
        now[0] += 50
        found.append(due.is_saving_due(step))
        if found[-1]:
            now[0] += 300  # that the save takes
            due.saved()
    assert found == [False, False, True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("every", "expected"), [(5, 5), (1, 1), (0.1, 1), (0.25, 3), (0.999, 10), (0.0001, 1)]
)
def test_a_share_is_of_all_steps_rounded_up(every: float, expected: int) -> None:
    assert step_count(every, 10) == expected
