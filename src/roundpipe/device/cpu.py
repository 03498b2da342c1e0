"""A device that is the CPU: every stream is a thread that runs its queue in order.

What makes it more than a thread pool is that nothing here costs much (a launch, its event and
another stream's wait take a few microseconds) and that nothing hides a mistake: work really runs
beside other work, so a missing wait is a real bug, and ``max_delay_seconds`` and
``poison_released`` make it show.

[Note: a launch is its own event]
Everything put on a stream is one `CpuEvent`: the work, its times and its completion. ``record``
returns the last one put, so it queues nothing, and waiting for one that has completed queues
nothing either.

[Note: threads of a thread]
The number of intra-op threads belongs to the thread that sets it (OpenMP and MKL keep it per
thread), but ``torch.set_num_threads`` also stores it as what threads born later start with. Each
stream therefore sets its own number and has that default put back by a thread that ends at once:
the caller's threads, those alive and those yet to come, compute as before.

[Note: who keeps a device alive]
A stream's thread knows its `_Stream`, never the `CpuDevice`: a device that is dropped without
``close`` is collected, runs what was launched and leaves no thread.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import queue
import random
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roundpipe.device.memory import Accounts, HostMemory
from roundpipe.device.untold import Untold
from roundpipe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0  # how long a process that ends waits for the work under way


class CpuEvent:
    """One thing on a stream: what to do, when it ran, and a latch that is set once.

    See [Note: a launch is its own event]. It is an Event and a Timing; ``start_seconds`` and
    ``end_seconds`` are NaN until then.
    """

    __slots__ = (
        "_done",
        "_waiters",
        "awaited",
        "end_seconds",
        "label",
        "on_error",
        "start_seconds",
        "stream",
        "work",
    )

    def __init__(
        self,
        stream: _Stream,
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
        self.start_seconds = math.nan
        self.end_seconds = math.nan
        self._done = False
        self._waiters: list[threading.Lock] = []

    def __repr__(self) -> str:
        return f"<{self} {'complete' if self._done else 'open'}>"

    def __str__(self) -> str:
        return f"{self.stream.name} {self.label}".rstrip()

    def is_complete(self) -> bool:
        """Whether the work has run."""
        return self._done

    def wait(self) -> None:
        """Block the calling thread until the work has run; at once if it has.

        The order is what makes it safe without a lock around it: a waiter enters the list before
        it looks at the flag, and the flag is set before the list is read.
        """
        if self._done:
            return
        lock = threading.Lock()
        lock.acquire()  # ours only until the event completes
        self._waiters.append(lock)
        if not self._done:
            lock.acquire()

    def complete(self) -> None:
        """Set the latch and wake whoever waits."""
        self.end_seconds = time.perf_counter()
        self._done = True
        for lock in self._waiters:
            lock.release()


@dataclass(frozen=True)
class _Manner:
    """How the streams of one device behave."""

    threads: int
    default_threads: int
    max_delay_seconds: float
    seed: int


class _Stream:
    """A queue and the thread that runs it. ``untold`` is shared by all streams of the device."""

    def __init__(self, name: str, manner: _Manner, untold: Untold) -> None:
        self.name = name
        self.last: CpuEvent | None = None
        self.abandoned = False
        self._manner = manner
        self._untold = untold
        self._current: CpuEvent | None = None
        self._queue: queue.SimpleQueue[CpuEvent | None] = queue.SimpleQueue()
        title = "roundpipe " + " ".join(name.split(".", 1))
        self.thread = threading.Thread(target=self._serve, name=title, daemon=True)
        self.thread.start()

    def put(self, event: CpuEvent) -> None:
        self.last = event
        self._queue.put(event)

    def end(self) -> None:
        """Let the thread end once it has run what was put before."""
        self._queue.put(None)

    def describe(self) -> str:
        event = self._current
        if event is None:
            return "idle"
        awaited = event.awaited
        if awaited is not None:
            return f"waiting for {awaited}"
        return str(event.label) or "work without a label"

    def _serve(self) -> None:
        _set_own_threads(self._manner)
        delay = self._manner.max_delay_seconds
        draw = random.Random(f"{self._manner.seed} {self.name}").random
        get = self._queue.get
        while (event := get()) is not None:
            self._current = event
            if delay and event.work is not None:
                time.sleep(delay * draw())
            self._run(event)
            self._current = None
            del event  # while the queue is empty this frame must not keep the last result alive

    def _run(self, event: CpuEvent) -> None:
        event.start_seconds = time.perf_counter()
        try:
            if self.abandoned:
                pass  # what waits for it must end too
            elif event.awaited is not None:
                event.awaited.wait()
            elif event.work is not None:
                event.work()
        except BaseException as error:
            self._untold.tell(error, event.on_error)
        event.work = event.awaited = event.on_error = None
        event.complete()


def _set_own_threads(manner: _Manner) -> None:
    """See [Note: threads of a thread]."""
    torch.get_num_threads()  # a thread's first question would overwrite a number set before it
    torch.set_num_threads(manner.threads)
    if manner.threads != manner.default_threads:
        restore = threading.Thread(target=torch.set_num_threads, args=(manner.default_threads,))
        restore.start()
        restore.join()


def _end(streams: Mapping[str, _Stream], exit_hook: Callable[[], None]) -> None:
    """End the streams of a device that was dropped; runs wherever the collector does."""
    atexit.unregister(exit_hook)
    for stream in streams.values():
        stream.end()


def _end_at_exit(streams: Mapping[str, _Stream]) -> None:
    """Drop what is queued and let the rest end: a daemon inside torch must not see Python go."""
    for stream in streams.values():
        stream.abandoned = True
        stream.end()
    deadline = time.monotonic() + _EXIT_SECONDS
    for stream in streams.values():
        stream.thread.join(max(0.0, deadline - time.monotonic()))


class CpuDevice:
    """The CPU as a device.

    ``threads`` is the intra-op threads of each stream (default: as many as the constructing thread
    has). For tests: every work is preceded by a random sleep of up to ``max_delay_seconds``, drawn
    from ``seed`` and the stream's name; ``poison_released`` fills new and freed buffers with NaN;
    ``capacity_bytes`` limits what ``allocate`` gives.
    """

    def __init__(
        self,
        name: str = "cpu",
        *,
        threads: int | None = None,
        max_delay_seconds: float = 0.0,
        seed: int = 0,
        poison_released: bool = False,
        capacity_bytes: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise DeviceError(f"{name} needs at least one thread: {threads}")
        default = torch.get_num_threads()
        self._name = name
        self._manner = _Manner(threads or default, default, max_delay_seconds, seed)
        self._accounts = Accounts(name, capacity_bytes)
        self._memory = HostMemory(self._accounts, poison=poison_released)
        self._untold = Untold()
        self._streams: dict[str, _Stream] = {}
        self._making = threading.Lock()
        exit_hook = functools.partial(_end_at_exit, self._streams)
        atexit.register(exit_hook)
        self._finalizer = weakref.finalize(self, _end, self._streams, exit_hook)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"CpuDevice({self._name!r}, threads={self.threads})"

    @property
    def name(self) -> str:
        """See Device."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("cpu")

    @property
    def threads(self) -> int:
        """Intra-op threads of each stream."""
        return self._manner.threads

    @property
    def allocated_bytes(self) -> int:
        """See Device."""
        return self._accounts.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """See Device."""
        return self._accounts.peak_bytes

    def launch(  # noqa: PLR0913 - see Device
        self,
        stream: str,
        work: Callable[[], object],
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Hashable] = (),
        timed: bool = False,
        label: object = "",
        on_error: Callable[[BaseException], None] | None = None,
    ) -> CpuEvent | None:
        """See Device. Makes the stream's thread at its first use."""
        target = self._streams.get(stream) or self._make(stream)
        event = CpuEvent(target, work, label=label, on_error=on_error)
        target.put(event)
        return event if timed else None

    def record(self, stream: str) -> CpuEvent:
        """See Device. Queues nothing."""
        target = self._streams.get(stream) or self._make(stream)
        if target.last is None:
            target.last = CpuEvent(target)
            target.last.complete()
        return target.last

    def wait(self, stream: str, event: Event) -> None:
        """See Device. Queues nothing if the event is complete or of this very stream."""
        if event.is_complete():
            return
        target = self._streams.get(stream) or self._make(stream)
        if isinstance(event, CpuEvent) and event.stream is target:
            return
        target.put(CpuEvent(target, awaited=event))

    def allocate(self, num_bytes: int) -> Tensor:
        """See Device. The pages are touched, so no step pays for that."""
        return self._memory.allocate(num_bytes)

    def free(self, buffer: Tensor) -> None:
        """See Device."""
        self._memory.free(buffer)

    def poison(self, buffer: Tensor) -> None:
        """See Device."""
        self._memory.poison(buffer)

    @property
    def pins(self) -> bool:
        """See Device. Its memory is the host's."""
        return False

    def register(self, address: int, num_bytes: int) -> None:
        """See Device. Nothing to gain."""

    def unregister(self, address: int) -> None:
        """See Device."""

    def hold(self, stream: str, *tensors: Tensor) -> None:
        """See Device. A queued closure holds its tensors by itself."""

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """See Device. Nothing is checked here."""

    def disown(self, key: Hashable) -> None:
        """See Device. Nothing is checked here."""

    def describe(self) -> dict[str, str]:
        """See Device."""
        return {name: stream.describe() for name, stream in tuple(self._streams.items())}

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """See Device."""
        self._finalizer()
        left = _join((stream.thread for stream in self._streams.values()), timeout_seconds)
        if left:
            logger.warning("%s: left behind at close: %s", self._name, ", ".join(left))
        self._streams.clear()  # so that a launch after this finds none and cannot be lost
        self._untold.raise_first()

    def _make(self, name: str) -> _Stream:
        with self._making:
            if not self._finalizer.alive:
                raise DeviceError(f"device is closed: {self._name}")
            if name not in self._streams:
                full = f"{self._name}.{name}"
                self._streams[name] = _Stream(full, self._manner, self._untold)
            return self._streams[name]


def _join(threads: Iterable[threading.Thread], timeout_seconds: float | None) -> list[str]:
    """Wait for all of ``threads`` but this one; the names of those that did not end in time."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    left = []
    for thread in threads:
        if thread is threading.current_thread():
            continue
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left
