"""What an emulated machine plays: streams, and what is put on them.

Everything on a stream is one `Entry`: a work or a wait, its emulated times and its completion.
``record`` returns the last one put, so it puts nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.device.api import Event
    from roundpipe.device.emulated_links import Load
    from roundpipe.device.memory import Accounts
    from roundpipe.device.untold import Untold


class Holding:
    """One device's memory and troubles, as its streams need them."""

    def __init__(self, accounts: Accounts, untold: Untold) -> None:
        self.accounts, self.untold = accounts, untold
        self._activations = 0  # bytes that loads took and have not given back

    def begin(self, load: Load) -> None:
        """Take what a work needs; raises torch.OutOfMemoryError."""
        if load.takes or load.needs:
            self.accounts.reserve(load.takes + load.needs)
            self._activations += load.takes

    def end(self, load: Load) -> None:
        """Give back what a work needs no longer."""
        given = min(load.gives, self._activations)  # less where a step that failed was forgotten
        if given or load.needs:
            self._activations -= given
            self.accounts.unreserve(load.needs + given)

    def forget(self) -> None:
        """Give back all that works have taken. Nothing may be under way."""
        self.accounts.unreserve(self._activations)
        self._activations = 0


class Stream:
    """What one stream has to do, in order. ``last`` and ``known`` are of those who put."""

    def __init__(self, name: str, device: int, holding: Holding, clock: object) -> None:
        self.name, self.device, self.holding, self.clock = name, device, holding, clock
        self.last: Entry | None = None
        self.known = -math.inf  # when the last of the events had ended that needed no waiting
        self.queue: deque[Entry] = deque()
        self.current: Entry | None = None
        self.free = -math.inf  # since when nothing but a late host has held it up

    def describe(self) -> str:
        """What it does now, for people."""
        entry = self.current
        if entry is None:
            return "idle"
        awaited = entry.awaited
        if awaited is not None:
            return f"waiting for {awaited}"
        return str(entry.label) or "work without a label"


class Entry:
    """One thing on a stream: what to do, when it was done, and a latch that is set once.

    It is an Event and a Timing. Waiting takes no lock around it: a waiter enters the list before it
    looks at the flag, and the flag is set before the list is read.
    """

    __slots__ = (
        *("_done", "_waiters", "awaited", "end_seconds", "followers", "known", "label", "load"),
        *("on_error", "put_seconds", "serial", "start_seconds", "stream", "work"),
    )

    def __init__(
        self,
        stream: Stream,
        work: Callable[[], object] | None = None,
        *,
        awaited: Event | None = None,
        label: object = "",
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.stream = stream
        self.work = work
        self.awaited = awaited
        self.label = label
        self.on_error = on_error
        self.known = stream.known
        self.serial = 0
        self.load: Load | None = None
        self.followers: list[Entry] = []  # waits of other streams of the same clock
        self.put_seconds = self.start_seconds = self.end_seconds = math.nan
        self._done = False
        self._waiters: list[threading.Lock] = []

    def __repr__(self) -> str:
        return f"<{self} {'complete' if self._done else 'open'}>"

    def __str__(self) -> str:
        return f"{self.stream.name} {self.label}".rstrip()

    def is_complete(self) -> bool:
        """Whether emulated time has come to its end."""
        return self._done

    def wait(self) -> None:
        """Block the calling thread until it is complete; at once if it is."""
        self.wait_for(None)

    def wait_for(self, timeout_seconds: float | None) -> bool:
        """The same for so many real seconds at most; whether it is complete."""
        if self._done:
            return True
        lock = threading.Lock()
        lock.acquire()  # ours only until the entry completes
        self._waiters.append(lock)
        if self._done:
            return True
        return lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds))

    def complete(self, end_seconds: float) -> bool:
        """Set the latch; whether a host's thread was waiting for it."""
        self.end_seconds = end_seconds
        self.work = self.awaited = self.on_error = self.load = None
        self._done = True
        for lock in self._waiters:
            lock.release()
        return bool(self._waiters)
