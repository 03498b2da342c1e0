from __future__ import annotations

import threading

import pytest

from roundpipe.engine.handover import Handover
from roundpipe.errors import StallError, StepError


def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_is_published_is_received_by_everyone_before_and_after():
    handover, event, got = Handover(), object(), []
    assert handover.event is None
    early = [start(lambda: got.append(handover.receive(timeout=10))) for _ in range(3)]
    handover.publish(event)
    for thread in early:
        thread.join()
    assert got == [event] * 3
    assert handover.receive() is handover.event is event


def test_whoever_waits_for_what_was_given_up_gets_the_reason_now_and_later():
    handover, reason, got = Handover(), StepError("given up"), []

    def wait():
        try:
            handover.receive(timeout=10)
        except StepError as error:
            got.append(error)

    waiting = start(wait)
    handover.abandon(reason)
    waiting.join()
    wait()
    assert got == [reason, reason]


def test_what_was_published_stays_so_when_the_rest_is_given_up():
    handover, event = Handover(), object()
    handover.publish(event)
    handover.abandon(StepError("given up"))
    assert handover.receive() is event


def test_a_wait_may_have_an_end():
    with pytest.raises(StallError, match=r"not issued within 0\.01 s"):
        Handover().receive(timeout=0.01)


def test_what_is_published_as_a_waiter_enters_the_list_is_seen_by_it():
    """Who publishes has read the list before the waiter was in it: only a second look helps."""
    handover, event = Handover(), object()

    class Late(list):
        def append(self, lock):
            handover.publish(event)
            super().append(lock)

    handover._waiters = Late()
    assert handover.receive(timeout=10) is event


def test_no_wake_up_is_lost_however_the_threads_meet():
    """A waiter that comes between the look at the value and the waking would sleep for ever."""
    for _ in range(300):
        handover, met = Handover(), threading.Barrier(2, timeout=10)

        def publish(handover=handover, met=met):
            met.wait()
            handover.publish(object())

        publisher = start(publish)
        met.wait()
        assert handover.receive(timeout=10) is not None
        publisher.join()
