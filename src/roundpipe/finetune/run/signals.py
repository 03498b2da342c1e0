"""Ctrl-C, SIGTERM and a terminal that hangs up: a wish that the run grants after the step.

======================  ==================================  =======================================
while                   the first signal                    a second one
======================  ==================================  =======================================
before the first step   raises `Stopped` where it arrives   leaves at once
steps run (`patient`)   is noted in ``Stop.asked``; the     leaves at once; the last checkpoint is
                        loop finishes its step and saves    whole, files appear whole or not at all
======================  ==================================  =======================================

A handler in Python runs only between two bytecodes of the main thread, which may be inside a
library for long, and it may write nothing (it can interrupt a write). So a program also has a
thread that the system wakes with each signal: it shows the line, and it leaves.

What is raised in the middle of a library may be lost there: C code that imports clears it, a
``__del__`` prints it, a library makes an ImportError of it. So the thread looks whether the
exception is still alive, and leaves where nobody has it any longer; and a block that ends in
another way than by the signal that was raised in it ends by that signal all the same.

Launchers pass on a Ctrl-C that the terminal has sent to the whole group already, and a closed
terminal is told of twice: signals that come together count as one. A signal that was ignored when
the program began (``nohup``, a shell's background job) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Leave = Callable[[int], None]

_TOGETHER = 0.1  # seconds; nobody presses Ctrl-C twice in less
_PATIENCE = 2.0  # seconds the main thread gets to notice a signal before the first step
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_END = 0  # no signal has this number
_NOBODYS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(KeyboardInterrupt):
    """A signal ended the run, after it had saved what there was to save."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum
        self.is_told = False  # somebody has said what was saved

    @property
    def exit_code(self) -> int:
        """What a process that this signal ended leaves with: 128 and the signal's number."""
        return 128 + self.signum


class Stop:
    """What signals have asked for so far; ``asked`` is the number of the first one."""

    def __init__(self, leave: Leave | None = None) -> None:
        self.asked: int | None = None
        self._leave = leave
        self._first_at: float | None = None
        self._tell: Callable[[str], None] | None = None
        self._is_patient = False
        self._raised: weakref.ref[Stopped] | None = None  # by a handler, wherever that came
        self._is_over = threading.Event()  # nobody listens any more

    @property
    def is_asked(self) -> bool:
        """Whether the run is to end."""
        return self.asked is not None

    def check(self) -> None:
        """Raise `Stopped` if a signal came, also one whose exception was lost on its way."""
        if self.asked is not None:
            raise Stopped(self.asked) if self._raised is None else self._stopped(self.asked)

    def check_raised(self) -> None:
        """Raise `Stopped` if a handler raised it, whatever has become of that since."""
        if self._raised is not None:
            self.check()

    @contextlib.contextmanager
    def patient(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Only note signals while the block runs; ``tell`` is called once, with a signal's name.

        From another thread, at once.
        """
        self.check()
        self._tell, self._is_patient = tell, True
        try:
            yield
        finally:
            self._tell, self._is_patient = None, False

    def handle(self, signum: int, _frame: Any = None) -> None:
        """Take a signal in the main thread: see the table above."""
        if self.asked is None:
            if self._leave is None:  # else `watch` has the clock
                self._first_at = time.monotonic()
            if not self._is_patient:
                raise self._stopped(signum)
            self.asked = signum
        elif self._leave is None and not self._is_echo():
            raise KeyboardInterrupt  # of a notebook: its process must live

    def _stopped(self, signum: int) -> Stopped:
        """What a handler raises. No frame of its traceback may hold it: it must die where lost."""
        stopped = Stopped(signum)
        self._raised, self.asked = weakref.ref(stopped), signum
        return stopped

    def watch(self, wake: socket.socket) -> None:
        """Be woken by each signal until `_END`: show that it was heard, and leave at the second."""
        assert self._leave is not None
        while True:
            for signum in wake.recv(64):
                if signum == _END:
                    return
                if signum not in _signals():
                    continue
                if self._first_at is None:
                    self._first_at = time.monotonic()
                    threading.Thread(target=self._after_first, args=[signum], daemon=True).start()
                elif not self._is_echo():
                    self._leave(128 + signum)

    def _after_first(self, signum: int) -> None:
        tell = self._tell
        if tell is not None:
            tell(signal_name(signum))
            return
        until = time.monotonic() + _PATIENCE
        assert self._leave is not None
        while self.asked is None:  # the main thread is inside a library
            if time.monotonic() > until:
                self._leave(128 + signum)
                return
            self._is_over.wait(_TOGETHER)
        while self._raised is not None and not self._is_over.wait(_TOGETHER):
            if self._raised() is None:  # it was lost: nobody ends anything
                self._leave(128 + signum)
                return

    def end(self) -> None:
        """Have no thread wait for anything any more."""
        self._is_over.set()

    def _is_echo(self) -> bool:
        return self._first_at is not None and time.monotonic() - self._first_at < _TOGETHER


def leave_at_once(code: int) -> None:
    """End this process now: files are whole or absent, and the system frees locks and devices."""
    os._exit(code)


def signal_name(signum: int) -> str:
    """``^C``, ``SIGTERM``, ``SIGHUP``."""
    return "^C" if signum == signal.SIGINT else signal.Signals(signum).name


@contextlib.contextmanager
def listening(leave: Leave | None = None) -> Iterator[Stop]:
    """Listen to signals while the block runs; handlers are then what they were before.

    ``leave`` is how a second signal ends the program, with an exit code; None: it raises
    KeyboardInterrupt, as notebooks need it, and handlers that a script has set stay. Outside the
    main thread nothing is listened to.
    """
    stop = Stop(leave)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with contextlib.ExitStack() as undo:
        for number in _signals():
            before = signal.getsignal(number)
            if before is None or before == signal.SIG_IGN:
                continue
            if leave is None and before not in _NOBODYS:  # a script's own: it knows what to do
                continue
            signal.signal(number, stop.handle)
            undo.callback(signal.signal, number, before)
        if leave is not None:
            _start_watching(stop, undo)
        try:
            yield stop
        except Exception:
            stop.check_raised()  # what half an import makes of it is no problem of its own
            raise
        stop.check_raised()


@contextlib.contextmanager
def ending_a_script() -> Iterator[None]:
    """Have Ctrl-C be a KeyboardInterrupt, and any other signal that ended the block an exit.

    The exit code is then the signal's, 143 for SIGTERM, as whoever sent it (Slurm, systemd) expects
    it, and what a script has in ``finally`` or `atexit` is done.
    """
    try:
        yield
    except Stopped as end:
        if end.signum == signal.SIGINT:
            raise
        raise SystemExit(end.exit_code) from end


def _start_watching(stop: Stop, undo: contextlib.ExitStack) -> None:
    """Have a thread woken by signals, unless somebody else is already."""
    wake, wakened = socket.socketpair()
    undo.callback(wake.close)
    undo.callback(wakened.close)
    wakened.setblocking(False)
    before = signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
    undo.callback(signal.set_wakeup_fd, before)
    watcher = threading.Thread(target=stop.watch, args=[wake], name="signals", daemon=True)
    watcher.start()

    def end() -> None:
        stop.end()
        wakened.send(bytes([_END]))
        watcher.join()

    undo.callback(end)


def _signals() -> list[int]:
    return [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
