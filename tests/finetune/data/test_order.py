from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.order import Order
from roundpipe.finetune.settings.config import make_config

KINDS = st.sampled_from(  # packed rows have one length: grouping by it is refused
    [
        {"train_sampling_strategy": "random"},
        {"train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "group_by_length"},
        {"packing": True},
        {"packing": True, "train_sampling_strategy": "sequential"},
    ]
)


class Lengths:
    """Samples of which only the lengths are known."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = np.array(lengths, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)


def order_of(
    lengths: Any, parts: tuple[tuple[int, int, float], ...] | None = None, **changes: Any
) -> Order:
    given = {"model": "m", "dataset": "d.jsonl", "batch_size": 4, "max_length": 64, **changes}
    dataset = SimpleNamespace(samples=Lengths(lengths), parts=parts or ((0, len(lengths), 1.0),))
    return Order.of(make_config(given)[0], dataset)


def samples_of_epoch(order: Order, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)
    return [i for step in steps for row in order.rows(step) for i in row]


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=50),
    batch_size=st.integers(1, 9),
    kind=KINDS,
)
@settings(max_examples=40)
def test_an_epoch_holds_every_sample_once_in_full_batches_but_the_last(
    lengths: list[int], batch_size: int, kind: dict[str, Any]
) -> None:
    order = order_of(lengths, batch_size=batch_size, **kind)
    for epoch in (0, 1, 5):
        assert sorted(samples_of_epoch(order, epoch)) == list(range(len(lengths)))
    sizes = [len(order.rows(step)) for step in range(1, order.steps_per_epoch + 1)]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= batch_size
    assert sum(sizes) == order.num_rows


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    weights=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
    kind=KINDS,
    step=st.integers(1, 30),
)
@settings(max_examples=30)
def test_a_step_asked_for_alone_is_the_step_of_a_run_from_the_start(
    lengths: list[int], weights: tuple[float, float], kind: dict[str, Any], step: int
) -> None:
    half = (len(lengths) + 1) // 2
    parts = tuple(
        (start, stop, weight)
        for start, stop, weight in ((0, half, weights[0]), (half, len(lengths), weights[1]))
        if stop > start
    )
    resumed, from_start = (order_of(lengths, parts, **kind) for _ in range(2))
    wanted = resumed.rows(step)
    assert [from_start.rows(before) for before in range(1, step + 1)][-1] == wanted
    assert resumed.rows(step) == wanted


@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    weights=st.tuples(st.floats(0.05, 3.5), st.floats(0.05, 3.5)),
)
@settings(max_examples=25)
def test_a_weight_is_the_share_of_an_epoch_and_over_epochs_samples_are_seen_alike_often(
    sizes: tuple[int, int], weights: tuple[float, float]
) -> None:
    first, second = sizes
    parts = ((0, first, weights[0]), (first, first + second, weights[1]))
    order = order_of([5] * (first + second), parts, batch_size=30)
    taken = [max(1, round(w * n)) for w, n in zip(weights, sizes, strict=True)]
    assert order.num_rows == sum(taken)
    seen: Counter[int] = Counter()
    for epoch in range(6):
        here = samples_of_epoch(order, epoch)
        assert sum(i < first for i in here) == taken[0]
        seen.update(here)
        for start, stop, _ in parts:
            counts = [seen[i] for i in range(start, stop)]
            assert max(counts) - min(counts) <= 1


def test_half_of_a_part_is_another_half_in_the_next_epoch() -> None:
    order = order_of([5] * 10, ((0, 10, 0.5),))
    first, second = samples_of_epoch(order, 0), samples_of_epoch(order, 1)
    assert sorted(first + second) == list(range(10))


def test_epochs_differ_and_hang_on_the_data_seed_alone() -> None:
    def epoch(number: int = 0, **changes: Any) -> list[int]:
        return samples_of_epoch(order_of([5] * 30, **changes), number)

    assert epoch(0) != epoch(1)
    assert epoch(seed=1, data_seed=5) == epoch(seed=2, data_seed=5)
    assert epoch(seed=1) == epoch(seed=9, data_seed=1)
    assert epoch(seed=1) != epoch(seed=2)
    assert epoch(batch_size=7) == epoch(batch_size=3)
    assert epoch(train_sampling_strategy="sequential") == list(range(30))
    grouped = order_of(range(1, 31), train_sampling_strategy="group_by_length")
    last = grouped.steps_per_epoch
    assert grouped.rows(last) != grouped.rows(2 * last)  # one after the other, of the same place


def test_parts_are_mixed() -> None:
    order = order_of([5] * 60, ((0, 30, 1.0), (30, 60, 1.0)))
    epoch = samples_of_epoch(order, 0)
    assert 8 < sum(i < 30 for i in epoch[:30]) < 22
    # And otherwise in the next epoch.
    again = samples_of_epoch(order, 1)
    assert [i < 30 for i in epoch] != [i < 30 for i in again]


def test_grouping_by_length_saves_most_of_the_padding() -> None:
    lengths = np.random.RandomState(0).randint(1, 65, 400)

    def padded(**changes: Any) -> int:
        order = order_of(lengths, **changes)
        batches = [order.rows(step) for step in range(1, order.steps_per_epoch + 1)]
        return sum(len(rows) * max(lengths[i] for (i,) in rows) for rows in batches)

    wasted = {
        strategy: padded(train_sampling_strategy=strategy) - int(lengths.sum())
        for strategy in ("random", "group_by_length")
    }
    assert wasted["group_by_length"] < 0.1 * wasted["random"]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"num_train_epochs": 2}, 6),
        ({"num_train_epochs": 0.5}, 2),
        ({"num_train_epochs": 1.5}, 5),
        ({"num_train_epochs": 0.01}, 1),
        ({"num_train_epochs": 1, "max_steps": 7}, 7),
    ],
)
def test_parts_of_an_epoch_are_rounded_up_and_max_steps_goes_before(
    changes: dict[str, Any], steps: int
) -> None:
    order = order_of([5] * 12, batch_size=5, **changes)
    assert (order.steps_per_epoch, order.total_steps) == (3, steps)
    assert order.epoch(6) == 2.0


def test_packed_rows_are_counted_and_never_longer_than_max_length() -> None:
    order = order_of([30, 30, 40, 5, 60], packing=True)
    assert order.num_rows == 3
    assert order.longest == 60
    assert sorted(sorted(row) for row in order.rows(1)) == [[0, 1], [2, 3], [4]]
    assert order_of([30, 40]).longest == 40
    assert order.describe() == ["packing: 5 samples in 3 rows of up to 60 tokens, 92 % filled"]
    weighted = order_of([5] * 10, ((0, 10, 0.5),))
    assert weighted.describe() == ["by weight an epoch sees 5 of 10 samples"]
    assert order_of([5] * 10).describe() == []


def test_a_hundred_million_samples_are_no_list() -> None:
    """A step is a few hundred integer operations, whatever the number of samples."""
    samples = SimpleNamespace(lengths=np.zeros(1, np.int64))
    dataset = SimpleNamespace(samples=samples, parts=((0, 10**8, 1.0), (10**8, 10**8 + 5, 2.0)))
    config, _ = make_config({"model": "m", "dataset": "d.jsonl", "batch_size": 16})
    order = Order.of(config, dataset)
    assert order.num_rows == 10**8 + 10
    rows = order.rows(2 * order.steps_per_epoch)
    assert all(0 <= i < 10**8 + 5 for (i,) in rows)


@pytest.mark.parametrize("packing", [False, True])
def test_a_part_of_which_all_was_held_out_takes_no_place(packing: bool) -> None:
    order = order_of([3] * 4, parts=((0, 4, 1.0), (4, 4, 1.0)), packing=packing)
    assert sorted(samples_of_epoch(order, 0)) == [0, 1, 2, 3]
    assert sorted(samples_of_epoch(order, 1)) == [0, 1, 2, 3]


def test_what_makes_no_whole_batch_is_left_out_of_every_epoch() -> None:
    lengths = range(1, 15)
    order = order_of(lengths, train_sampling_strategy="sequential", batch_size=8).in_whole(4)
    assert (order.num_rows, order.steps_per_epoch) == (12, 2)
    for epoch in (0, 1, 3):
        assert samples_of_epoch(order, epoch) == list(range(12))
    assert order.describe() == ["each epoch leaves out 2 samples, which make no whole batch"]
    mixed = order_of(lengths, batch_size=8).in_whole(4)
    seen = [sorted(samples_of_epoch(mixed, epoch)) for epoch in range(6)]
    assert all(len(set(each)) == 12 for each in seen)
    assert len(set(map(tuple, seen))) > 1  # others are left out of the next
    with pytest.raises(ConfigError, match="leaves nothing of 14 rows"):
        order.in_whole(15)
