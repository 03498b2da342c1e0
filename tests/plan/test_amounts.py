from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.plan.amounts import read_bytes, read_rate, write_bytes, write_rate


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64GB", 64 * 10**9),
        ("64 GiB", 64 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("512m", 512_000_000),
        ("2t", 2 * 10**12),
        ("7", 7),
        ("7 B", 7),
        ("24.713265152 GB", 24_713_265_152),
    ],
)
def test_amounts_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert read_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "3XB", "3 GB/s", "1,5GB", "nan"])
def test_what_is_no_amount_is_none(text: str) -> None:
    assert read_bytes(text) is None


def test_rates_may_say_per_second() -> None:
    assert read_rate("25 GB/s") == read_rate("25GB") == read_rate("25 GB / sec") == 25e9
    assert read_rate("fast") is None


def test_people_get_three_digits() -> None:
    assert write_bytes(24_713_265_152) == "24.7 GB"
    assert write_bytes(999) == "999 B"
    assert write_bytes(512 * 10**9) == "512 GB"
    assert write_bytes(1234) == "1.23 kB"
    assert write_rate(150e9) == "150 GB/s"


@given(st.integers(0, 10**15))
def test_exact_amounts_read_back(num_bytes: int) -> None:
    assert read_bytes(write_bytes(num_bytes, exact=True)) == num_bytes


@given(st.floats(1e3, 1e14))
def test_rounded_amounts_are_near(amount: float) -> None:
    assert read_bytes(write_bytes(amount)) == pytest.approx(amount, rel=6e-3)
