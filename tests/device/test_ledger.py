from __future__ import annotations

import pytest
import torch

from roundpipe.device.ledger import Ledger, Span


def span(start: int, end: int) -> Span:
    return Span(0, start, end)


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(2, 8)]),
        ([(0, 2), (8, 9)], [(2, 8)]),
        ([(0, 3)], [(3, 8)]),
        ([(7, 9)], [(2, 7)]),
        ([(3, 5)], [(2, 3), (5, 8)]),
        ([(2, 8)], []),
        ([(2, 5), (4, 8)], []),
        ([(3, 4), (6, 7)], [(2, 3), (4, 6), (7, 8)]),
    ],
)
def test_spans_are_cut_out(others: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert span(2, 8).without([span(*other) for other in others]) == [span(*one) for one in left]


def test_a_span_reaches_from_the_first_to_the_last_element() -> None:
    tensor = torch.zeros(6, 4, dtype=torch.float32)
    base = tensor.untyped_storage().data_ptr()
    assert Span.of(tensor) == Span(base, 0, 96)
    assert Span.of(tensor[1:3]) == Span(base, 16, 48)
    assert Span.of(tensor[:, 1]) == Span(base, 4, 88)
    assert Span.of(tensor[:0]) is None


def test_spans_of_two_storages_never_overlap() -> None:
    assert not Span(1, 0, 8).overlaps(Span(2, 0, 8))


def test_a_refused_work_leaves_no_trace() -> None:
    ledger = Ledger()
    assert ledger.access("a", "first", reads=(), writes=("x",)) is None
    assert ledger.access("b", "second", reads=("y",), writes=("x",)) is not None
    assert ledger.access("a", "third", reads=(), writes=("x", "y")) is None


def test_reading_and_writing_one_buffer_in_one_work_is_no_race() -> None:
    assert Ledger().access("a", "add", reads=("x",), writes=("x",)) is None


def test_a_write_forgets_disowned_buffers_it_covers() -> None:
    ledger = Ledger()
    arena = torch.zeros(64, dtype=torch.uint8)
    for step in range(100):
        ledger.own(step, arena)
        assert ledger.access("a", "write", reads=(), writes=(step,)) is None
        ledger.disown(step)
    assert len(ledger._buffers) <= 2


def test_a_buffer_that_two_keys_own_is_found_by_both() -> None:
    ledger = Ledger()
    arena = torch.zeros(64, dtype=torch.uint8)
    ledger.own("whole", arena)
    ledger.own("half", arena[:32])
    ledger.own("half", arena[:32])
    owners = ledger.owners(Span(arena.untyped_storage().data_ptr(), 0, 8))
    assert [key for key, _ in owners] == ["whole", "half"]
    ledger.disown("half")
    owners = ledger.owners(Span(arena.untyped_storage().data_ptr(), 0, 8))
    assert [key for key, _ in owners] == ["whole"]
