import math
import warnings

import pytest
import torch
from transformers import get_scheduler

from roundpipe.errors import ConfigError
from roundpipe.finetune.run.schedule import make_scheduler, rate_factor, warmup_step_count


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


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_numbers_are_those_of_transformers(name: str, warmup: int) -> None:
    def run(make: object) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = make(optimizer)  # type: ignore[operator]
        found = []
        for _ in range(10):
            found.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = run(
            lambda o: get_scheduler(name, o, num_warmup_steps=warmup, num_training_steps=10)
        )
    factor = rate_factor(name, num_warmup_steps=warmup, total_steps=10)
    assert run(lambda o: make_scheduler(o, factor)) == pytest.approx(theirs, rel=1e-12)
