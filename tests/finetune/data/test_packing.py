from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.finetune.data.packing import pack

CAPACITIES = st.integers(1, 40)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of the rows of best fit decreasing, a sample at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(capacity - room for room in rooms)


@given(capacity=CAPACITIES, data=st.data())
def test_every_sample_stands_in_one_row_and_no_row_is_longer(
    capacity: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    found = pack(np.array(lengths, np.int64), capacity)
    rows = [found.row(row) for row in range(found.num_rows)]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert [sum(lengths[i] for i in row) for row in rows] == found.tokens.tolist()
    assert all(1 <= tokens <= capacity for tokens in found.tokens)


@given(capacity=CAPACITIES, data=st.data())
def test_rows_are_filled_as_if_samples_were_placed_one_by_one(
    capacity: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    found = pack(np.array(lengths, np.int64), capacity)
    assert sorted(found.tokens.tolist()) == one_by_one(lengths, capacity)


@given(first=st.lists(st.integers(1, 9), max_size=20), second=st.lists(st.integers(1, 9)))
def test_samples_of_different_parts_share_no_row(first: list[int], second: list[int]) -> None:
    lengths = np.array(first + second, np.int64)
    border = len(first)
    found = pack(lengths, 10, parts=[(0, border), (border, len(lengths))])
    for row in range(found.num_rows):
        assert len({i < border for i in found.row(row)}) == 1
    assert found.order.tolist() != [] or not len(lengths)


def test_a_hundred_thousand_samples_are_packed_almost_full_in_a_few_thousand_operations() -> None:
    random = np.random.RandomState(0)
    lengths = np.clip(random.lognormal(5.5, 1.0, 100_000), 1, 2048).astype(np.int64)
    found = pack(lengths, 2048)
    assert found.share_filled > 0.999
    again = pack(lengths, 2048)
    assert np.array_equal(found.order, again.order)
    assert np.array_equal(found.starts, again.starts)
