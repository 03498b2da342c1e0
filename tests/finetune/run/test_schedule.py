from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from roundpipe.errors import ConfigError
from roundpipe.finetune.run.schedule import (
    Shape,
    factor_of,
    make_scheduler,
    rate_factor,
    warmup_step_count,
)
from roundpipe.finetune.settings.config import make_config

if TYPE_CHECKING:
    from collections.abc import Callable


def rates(name: str, *, warmup: int, total: int, min_ratio: float = 0.0) -> list[float]:
    factor = rate_factor(name, num_warmup_steps=warmup, total_steps=total, min_ratio=min_ratio)
    return [factor(step) for step in range(total + 1)]


def test_linear_rises_and_falls_on_straight_lines() -> None:
    assert rates("linear", warmup=2, total=6) == [0, 0.5, 1, 0.75, 0.5, 0.25, 0]


def test_cosine_follows_its_closed_form_down_to_its_minimum() -> None:
    found = rates("cosine", warmup=0, total=8, min_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[-1] == pytest.approx(0.1)


def test_constant_ignores_warm_up_and_its_other_form_does_not() -> None:
    assert rates("constant", warmup=2, total=3) == [1, 1, 1, 1]
    assert rates("constant_with_warmup", warmup=2, total=3) == [0, 0.5, 1, 1]


def test_the_rate_stays_at_its_minimum_after_the_last_step() -> None:
    factor = rate_factor("cosine", num_warmup_steps=0, total_steps=4, min_ratio=0.2)
    assert factor(9) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("warmup_steps", "total", "expected"),
    [(0.03, 40, 2), (0.5, 3, 2), (0, 10, 0), (5, 10, 5), (1, 9, 1)],
)
def test_a_warm_up_below_one_is_a_share_of_all_steps(
    warmup_steps: float, total: int, expected: int
) -> None:
    assert warmup_step_count(warmup_steps, total) == expected


def test_an_unknown_schedule_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"(?s)lr_scheduler_type: wavy.*hint: .*cosine"):
        rate_factor("wavy", num_warmup_steps=0, total_steps=1)


def _run(make: Callable[[Any], Any]) -> list[float]:
    """The rate of each of ten steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make(optimizer)
    found = []
    for _ in range(10):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def _theirs(name: str, warmup: int, **more: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(
            lambda optimizer: get_scheduler(
                name,
                optimizer,
                num_warmup_steps=warmup,
                num_training_steps=10,
                scheduler_specific_kwargs=more or None,
            )
        )


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_numbers_are_those_of_transformers(name: str, warmup: int) -> None:
    factor = rate_factor(name, num_warmup_steps=warmup, total_steps=10)
    found = _run(lambda optimizer: LambdaLR(optimizer, factor))
    assert found == pytest.approx(_theirs(name, warmup), rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("name", "said", "more"),
    [
        ("cosine", {}, {"num_cycles": 1.5}),
        ("cosine_with_min_lr", {"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {}, {"min_lr": 0.1, "num_cycles": 0.7}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 4}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 9}),  # more than the warm-up leaves
        ("warmup_stable_decay", {"min_lr_ratio": 0.2}, {"num_decay_steps": 4, "min_lr_ratio": 0.2}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 3, "num_stable_steps": 2}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 5, "decay_type": "linear"}),
        (
            "warmup_stable_decay",
            {},
            {"num_decay_steps": 5, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"},
        ),
        ("warmup_stable_decay", {}, {"num_decay_steps": 5, "warmup_type": "cosine"}),
    ],
)
def test_what_a_config_says_besides_means_what_it_means_to_transformers(
    warmup: int, name: str, said: dict[str, Any], more: dict[str, Any]
) -> None:
    config = config_with(name, warmup_steps=warmup, **said)
    ours = {key: value for key, value in more.items() if key not in said}
    if "min_lr_ratio" in said:
        ours.pop("min_lr_rate", None)
    told: Any = SimpleNamespace(**{**config, "lr_scheduler_kwargs": ours})
    found = _run(lambda optimizer: make_scheduler(optimizer, told, 10))
    assert found == pytest.approx(_theirs(name, warmup, **more), rel=1e-12, abs=1e-15)


def config_with(name: str, **said: Any) -> dict[str, Any]:
    usual = {"learning_rate": 0.5, "min_lr_ratio": None, "warmup_steps": 0}
    return {"lr_scheduler_type": name, **usual, **said}


def test_a_stable_schedule_decays_in_the_last_tenth_unless_told_otherwise() -> None:
    factor = rate_factor("warmup_stable_decay", num_warmup_steps=0, total_steps=40)
    assert [factor(step) < 1 for step in (0, 36, 37, 39)] == [False, False, True, True]
    half = rate_factor(
        "warmup_stable_decay",
        num_warmup_steps=0,
        total_steps=40,
        shape=Shape(num_decay_steps=0.5, decay_type="linear"),
    )
    assert half(30) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "said", "problem"),
    [
        ("cosine_with_min_lr", {}, "not down to what\nhint: min_lr_ratio=0.1"),
        ("cosine", {"lr_scheduler_kwargs": {"wave": 1}}, "lr_scheduler_kwargs: wave\nhint: known"),
        ("cosine", {"lr_scheduler_kwargs": {"min_lr": 0.6}}, "not within the rate: min_lr=0.6"),
        (
            "cosine",
            {"min_lr_ratio": 0.1, "lr_scheduler_kwargs": {"min_lr": 0.1}},
            "given as min_lr and as min_lr_ratio",
        ),
        (
            "warmup_stable_decay",
            {"lr_scheduler_kwargs": {"decay_type": "steep"}},
            "decay_type: steep\nhint: one of linear, cosine, 1-sqrt",
        ),
    ],
)
def test_what_means_nothing_is_refused(name: str, said: dict[str, Any], problem: str) -> None:
    config: Any = SimpleNamespace(**config_with(name, **said))
    with pytest.raises(ConfigError, match=problem):
        factor_of(config, 10)


def test_a_config_as_it_is_gives_its_schedule() -> None:
    config, _ = make_config(
        {"model": "m", "dataset": "d.jsonl", "lr_scheduler_type": "linear", "warmup_steps": 2}
    )
    assert [factor_of(config, 6)(step) for step in range(3)] == [0, 0.5, 1]
