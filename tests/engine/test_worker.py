from __future__ import annotations

import logging
import threading
import weakref

from roundpipe.engine.worker import Worker


def test_tasks_run_in_order_in_one_thread_of_their_own():
    worker, ran = Worker("test"), []
    for number in range(100):
        worker.put(lambda number=number: ran.append((number, threading.current_thread().name)))
    worker.close(10)
    assert ran == [(number, "roundpipe test worker") for number in range(100)]


def test_a_task_that_raises_is_logged_and_the_next_one_runs(caplog):
    worker, ran = Worker("test"), []
    worker.put(lambda: 1 // 0)
    worker.put(lambda: ran.append(1))
    with caplog.at_level(logging.ERROR):
        worker.close(10)
    assert ran == [1]
    assert "a task of roundpipe test worker raised" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_worker_is_closed_from_anywhere_any_number_of_times():
    worker, closed = Worker("test"), threading.Event()
    worker.put(lambda: (worker.close(), closed.set()))  # by its own thread: does not wait for it
    assert closed.wait(10)
    worker.close(10)
    worker.close(10)
    worker.put(closed.clear)  # comes too late to be run
    assert closed.is_set()


def test_an_idle_worker_keeps_nothing_of_its_last_task_alive():
    class Thing:
        pass

    worker, thing, told = Worker("test"), Thing(), threading.Event()
    gone = weakref.ref(thing, lambda _: told.set())
    worker.put(lambda thing=thing: None)
    del thing
    assert told.wait(10)
    assert gone() is None
    worker.close(10)
