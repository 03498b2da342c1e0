"""Pass something once from one stream to others.

Between two streams there are two moments: the host has *issued* the work (there is an event to
wait for) and the device has *completed* it (the event). A handover is made anew for every step,
set once and never cleared, so nothing can be cleared too early.

[Note: latches without a condition variable] A waiter appends its lock, then looks at the value
again; the setter sets the value, then releases every lock it finds. Whatever the interleaving, the
waiter sees the value or the setter sees the lock. A wait costs one lock and one wake-up.
"""

from __future__ import annotations

from _thread import allocate_lock
from typing import TYPE_CHECKING

from roundpipe.errors import StallError

if TYPE_CHECKING:
    from _thread import LockType

    from roundpipe.device.api import Event


class Handover:
    """One action's event: published by one host thread, received by any number."""

    __slots__ = ("_error", "_event", "_waiters")

    def __init__(self) -> None:
        self._event: Event | None = None
        self._error: BaseException | None = None
        self._waiters: list[LockType] = []

    def publish(self, event: Event) -> None:
        """Say that the action is issued; ``event`` completes when it is done."""
        self._event = event
        self._wake()

    def abandon(self, error: BaseException) -> None:
        """Raise ``error`` in everyone who waits, now or later, unless it was published."""
        self._error = error
        self._wake()

    @property
    def event(self) -> Event | None:
        """The event if the action is issued, without waiting."""
        return self._event

    def receive(self, timeout: float | None = None) -> Event:
        """Block until the action is issued; raises what it was abandoned with.

        Raises StallError after ``timeout`` seconds.
        """
        if self._event is None and self._error is None:
            lock = allocate_lock()
            lock.acquire()
            self._waiters.append(lock)
            if self._event is None and self._error is None:  # noqa: SIM102 - see the note
                if not lock.acquire(timeout=-1 if timeout is None else timeout):
                    raise StallError(f"not issued within {timeout} s")
        if self._event is not None:
            return self._event
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        for lock in list(self._waiters):
            if lock.locked():
                lock.release()
