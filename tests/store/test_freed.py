"""What the C library keeps of freed memory goes back to the system."""

from __future__ import annotations

from roundpipe.store.freed import FreedMemory


def test_it_lets_go_now_and_then_and_in_the_end():
    freed, calls = FreedMemory(every=100), []
    freed._trim = calls.append
    for size in (60, 60, 60):
        freed.add(size)
    assert len(calls) == 1
    freed.give_back()
    freed.give_back()
    assert len(calls) == 2


def test_a_c_library_that_keeps_nothing_is_not_asked():
    freed = FreedMemory(every=1)
    freed._trim = None
    freed.add(2)
    freed.give_back()
