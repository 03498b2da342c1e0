from typing import Any

import pytest

from roundpipe.finetune.data.length import RunLength, sample_order


def test_epochs_are_counted_in_steps_and_the_last_short_batch_counts(config_of: Any) -> None:
    config = config_of(max_steps=None, num_train_epochs=2, batch_size=5)
    length = RunLength.of(config, 12)
    assert (length.steps_per_epoch, length.total_steps) == (3, 6)
    assert length.epoch(6) == 2.0


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (1.5, 5), (0.01, 1)])
def test_parts_of_an_epoch_are_rounded_up(config_of: Any, epochs: float, steps: int) -> None:
    config = config_of(max_steps=None, num_train_epochs=epochs, batch_size=5)
    assert RunLength.of(config, 12).total_steps == steps


def test_max_steps_goes_before_epochs(config_of: Any) -> None:
    assert RunLength.of(config_of(max_steps=7, num_train_epochs=1), 12).total_steps == 7


def test_every_epoch_takes_every_sample_once_in_an_order_of_its_own(config_of: Any) -> None:
    config = config_of(max_steps=6)
    order = list(sample_order(config, RunLength.of(config, 12)))
    assert [len(indices) for indices in order] == [5, 5, 2, 5, 5, 2]
    first, second = ([i for indices in part for i in indices] for part in (order[:3], order[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_the_order_depends_on_the_data_seed_alone(config_of: Any) -> None:
    def order(**changes: Any) -> list[list[int]]:
        config = config_of(max_steps=3, **changes)
        return list(sample_order(config, RunLength.of(config, 12)))

    assert order(seed=1, data_seed=5) == order(seed=2, data_seed=5)
    assert order(seed=1) == order(seed=9, data_seed=1)
    assert order(seed=1) != order(seed=2)


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, []),
        ({"val_size": 2, "eval_steps": 3}, [3, 6, 7]),
        ({"val_size": 2, "eval_strategy": "epoch"}, [3, 6, 7]),
        ({"val_size": 2, "eval_strategy": "no"}, []),
        ({"val_size": 2, "eval_steps": 100}, [7]),
    ],
)
def test_evaluation_is_due_every_so_often_and_at_the_end(
    config_of: Any, changes: dict[str, Any], due: list[int]
) -> None:
    config = config_of(max_steps=7, **changes)
    length = RunLength.of(config, 12)
    assert [step for step in range(1, 8) if length.is_evaluation_due(config, step)] == due
