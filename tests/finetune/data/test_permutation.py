from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.finetune.data.permutation import permuted


@given(count=st.integers(1, 3000), key=st.text(max_size=5))
def test_every_number_stands_at_one_place(count: int, key: str) -> None:
    assert sorted(permuted(np.arange(count), count, key).tolist()) == list(range(count))


@given(count=st.integers(1, 10**12), key=st.text(max_size=5), data=st.data())
def test_a_place_is_answered_alone_as_among_others(
    count: int, key: str, data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8)))
    together = permuted(places, count, key).tolist()
    alone = [permuted(places[i : i + 1], count, key)[0] for i in range(len(places))]
    assert together == alone
    assert all(0 <= number < count for number in together)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert permuted(np.arange(10), 10, "42/0").tolist() == [2, 3, 1, 7, 6, 0, 4, 8, 9, 5]
    assert permuted(np.arange(3), 10**8, "42/0").tolist() == [64844498, 82167883, 68899875]


def test_keys_give_all_orders_alike_often() -> None:
    seen = Counter(tuple(permuted(np.arange(4), 4, f"key {i}").tolist()) for i in range(600))
    assert set(seen) == set(permutations(range(4)))
    # 25 of each of 24 are expected; a spread of sqrt(25) is usual, of four times that is not.
    assert all(5 < count < 45 for count in seen.values())


def test_neighbours_of_a_long_order_are_no_neighbours_in_it() -> None:
    order = permuted(np.arange(100_000), 100_000, "k")
    distances = np.abs(np.diff(order))
    # Of a shuffled order they are a third of the length apart on the average.
    assert abs(distances.mean() / 100_000 - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
