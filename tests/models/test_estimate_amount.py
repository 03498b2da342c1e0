from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.models.estimate.amount import Amount

whole = st.integers(0, 10**9)


@given(whole, whole, st.integers(0, 10**5))
def test_three_counts_give_back_what_they_were_made_from(fixed, per_token, per_pair):
    amount = Amount(fixed, per_token, per_pair)
    lengths = (512, 1024, 2048)
    found = Amount.through(lengths, [amount.at(length, length) for length in lengths])
    for tokens, length in ((1, 1), (4 * 2048, 2048), (3 * 70_000, 70_000)):
        assert found.at(tokens, length) == pytest.approx(amount.at(tokens, length), rel=1e-6)


def test_what_equations_leave_of_a_zero_is_zero():
    counts = [1e15 / 7 * length for length in (512, 1024, 2048)]
    found = Amount.through((512, 1024, 2048), counts)
    assert found == Amount(0.0, pytest.approx(1e15 / 7), 0.0)
    counts = [1e15 / 7 * length + 1e-3 for length in (512, 1024, 2048)]
    assert Amount.through((512, 1024, 2048), counts).fixed == 0.0


def test_a_batch_of_sequences_attends_within_each_of_them():
    assert Amount(per_pair=1.0).at(4 * 100, 100) == 4 * 100 * 100
