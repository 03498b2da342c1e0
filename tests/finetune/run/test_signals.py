"""Signals as wishes: real ones, sent by this process to itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from roundpipe.finetune.run.signals import (
    Stop,
    Stopped,
    ending_a_script,
    listening,
    signal_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    threads = threading.active_count()
    yield
    assert {number: signal.getsignal(number) for number in EXIT_CODES} == before
    assert threading.active_count() <= threads
    assert signal.set_wakeup_fd(-1) == -1


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def noted(stop: Stop, number: int) -> None:
    """Send a signal that is only noted, and wait until it is."""
    send(number)
    while stop.asked is None:
        pass


@contextlib.contextmanager
def ended_by_a_signal(leave: Callable[[int], None] | None = None) -> Iterator[Stop]:
    """Listen to signals, and expect that one ends the block."""
    with pytest.raises(Stopped), listening(leave) as stop:
        yield stop


@pytest.mark.parametrize("number", EXIT_CODES)
def test_before_the_first_step_a_signal_leaves_at_once(number: signal.Signals) -> None:
    with pytest.raises(Stopped) as caught, listening(lambda _: None) as stop:
        noted(stop, number)
    assert caught.value.exit_code == EXIT_CODES[number]
    assert stop.asked == number


@pytest.mark.parametrize("number", EXIT_CODES)
def test_while_steps_run_a_signal_is_noted_and_told_at_once(number: signal.Signals) -> None:
    told: list[str] = []
    heard = threading.Event()

    def tell(name: str) -> None:
        told.append(name)
        heard.set()

    with listening(lambda _: None) as stop, stop.patient(tell):
        assert not stop.is_asked
        noted(stop, number)
        assert heard.wait(10)
    assert told == [signal_name(number)]
    with pytest.raises(Stopped):
        stop.check()


def left(first: int, second: int, monkeypatch: pytest.MonkeyPatch, *, apart: float) -> list[int]:
    """With which codes a program left that got two signals ``apart`` seconds from each other."""
    codes: list[int] = []
    has_left, heard = threading.Event(), threading.Event()
    now = [100.0]
    monkeypatch.setattr("roundpipe.finetune.run.signals.time.monotonic", lambda: now[0])

    def leave(code: int) -> None:
        codes.append(code)
        has_left.set()

    with listening(leave) as stop, stop.patient(lambda _: heard.set()):
        noted(stop, first)
        assert heard.wait(10)
        now[0] += apart
        send(second)
        if apart > 0.1:
            assert has_left.wait(10)
    return codes


def test_a_second_signal_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(signal.SIGINT, signal.SIGINT, monkeypatch, apart=0.2) == [130]
    assert left(signal.SIGINT, signal.SIGTERM, monkeypatch, apart=0.2) == [143]


def test_what_a_launcher_passes_on_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(signal.SIGINT, signal.SIGINT, monkeypatch, apart=0.01) == []
    assert left(signal.SIGHUP, signal.SIGTERM, monkeypatch, apart=0.01) == []


def test_a_main_thread_that_is_inside_a_library_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roundpipe.finetune.run.signals._PATIENCE", 0.0)
    monkeypatch.setattr("roundpipe.finetune.run.signals._TOGETHER", 0.001)
    codes: list[int] = []
    stop = Stop(codes.append)
    stop._after_first(signal.SIGTERM)  # its handler has not run
    assert codes == [143]


def test_a_notebook_is_never_left_but_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("roundpipe.finetune.run.signals.time.monotonic", lambda: now[0])
    with listening() as stop, stop.patient(lambda _: None):
        noted(stop, signal.SIGINT)
        now[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_handler_of_a_script_stays_and_is_called() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with listening() as stop:
            send(signal.SIGTERM)
            assert not stop.is_asked
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
)
def test_a_script_ends_as_its_signal_says(
    number: int, kind: type[BaseException], code: int | None
) -> None:
    with pytest.raises(kind) as caught, ending_a_script(), listening() as stop:
        noted(stop, number)
    assert getattr(caught.value, "code", None) == code


def test_what_was_ignored_at_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(lambda _: None) as stop:
            send(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert not stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_whose_exception_was_lost_is_not_forgotten() -> None:
    with ended_by_a_signal(lambda _: None) as stop:
        with contextlib.suppress(BaseException):  # as some libraries do
            noted(stop, signal.SIGTERM)
        with stop.patient(lambda _: None):
            raise AssertionError("a step was made")


def lose(stop: Stop) -> None:
    """Send a signal whose exception is dropped, as C code does that imports a module."""
    with contextlib.suppress(BaseException):
        noted(stop, signal.SIGINT)


def test_a_program_is_left_where_the_exception_of_a_signal_was_lost() -> None:
    codes: list[int] = []
    has_left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        has_left.set()

    with ended_by_a_signal(leave) as stop:
        lose(stop)
        assert has_left.wait(10), "the command went on"
    assert codes == [130]


class CountedEvent(threading.Event):
    """An event that tells how often it was waited for in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.vain = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        is_set = super().wait(timeout)
        if not is_set:
            self.vain.release()
        return is_set


def test_a_program_that_its_signal_is_ending_gets_the_time_it_takes() -> None:
    codes: list[int] = []
    with ended_by_a_signal(codes.append) as stop:
        stop._is_over = looks = CountedEvent()
        try:
            noted(stop, signal.SIGINT)
        finally:  # it is looked three times whether the exception was lost
            assert all(looks.vain.acquire(timeout=10) for _ in range(3))
    assert codes == []


def test_what_half_an_import_makes_of_a_signal_is_no_problem_of_its_own() -> None:
    with ended_by_a_signal(lambda _: None) as stop:
        lose(stop)
        raise ImportError("cannot import name")
    with ended_by_a_signal() as stop:  # of a library, which has nobody that leaves
        lose(stop)


def test_another_thread_listens_to_nothing() -> None:
    found: list[bool] = []

    def run() -> None:
        before = signal.getsignal(signal.SIGINT)
        with listening(lambda _: None) as stop:
            found.append(signal.getsignal(signal.SIGINT) is before and not stop.is_asked)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]
