"""The clock of an emulated machine: one thread that plays all its streams in emulated time.

[Note: emulated time] Time moves from event to event. Work starts exactly when the last thing it
waited for has ended and lasts exactly as long as the machine says, so neither late wake-ups nor a
busy computer add to it. Between two events the thread sleeps, ``time_scale`` real seconds for each
emulated one: real time only gives the host's threads the chance to put the next work in time. What
they put while the thread sleeps is put at the event before; what comes later than it could have
started is counted in ``late_seconds``. While nothing is under way time stands still, so what a
caller does between steps takes none.

[Note: one thread] The clock's thread runs the works too, each at the moment in which it starts.
Threads of their own would only wait for the interpreter's lock, and what comes first of two things
at one moment would be a matter of luck. A work that hangs stops the machine.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import queue
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from roundpipe.device.emulated_links import Flow, Links, Load, Road, Way
from roundpipe.device.emulated_stream import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.device.api import Event
    from roundpipe.device.emulated_stream import Stream
    from roundpipe.plan.machine import Machine

_SETTLE_SECONDS = 2e-4  # real; how long nobody has put anything before time moves
_CATCH_UP_SECONDS = 2e-3  # real; how much of a late wake-up is made good


class _CopyEngine:
    """One direction of one link: copies in the order in which they became ready."""

    def __init__(self) -> None:
        self.is_busy = False
        self.ready: list[tuple[float, int, Entry]] = []


class Clock:
    """See the module docstring. Devices hold their clock, it holds none of them.

    ``now`` counts from ``time.perf_counter`` at the clock's making. ``time_scale`` 0: no sleep.
    """

    def __init__(self, machine: Machine, *, time_scale: float) -> None:
        self.machine, self.time_scale = machine, time_scale
        self.now = time.perf_counter()
        self.late_seconds = 0.0  # summed over what takes time of its stream
        self.thread_seconds = 0.0  # processor time of the thread
        self.work_seconds = 0.0  # of this, in what it ran
        self._links = Links(machine)
        self._engines: dict[Road, _CopyEngine] = {}
        self._timers: list[tuple[float, int, Entry]] = []
        self._movable: deque[Stream] = deque()  # whose heads are to be looked at
        self._startable: deque[Road] = deque()  # whose copy engines are
        self._num_open = 0  # entries out of the inbox that are not complete
        self._anchor = math.nan  # real time of ``now``; NaN while time stands still
        self._stirred = 0.0  # real time at which a thread of the host last put or was woken
        self._serials = itertools.count()
        # What came for the thread; None only wakes it. Unlike other locks it bears being used by
        # the collector in the middle of its own use: a device may be dropped anywhere.
        self._inbox: queue.SimpleQueue[Entry | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # around the four below
        self._num_devices = self._num_holds = self._num_hurries = 0
        self._thread: threading.Thread | None = None
        self._is_dropping = False

    # ---- from any thread

    def put(self, entry: Entry) -> None:
        """Append to a stream."""
        entry.serial = next(self._serials)
        entry.stream.last = entry
        self._inbox.put(entry)
        if self._thread is None:
            self._start()

    def enter(self) -> None:
        """Count one more device."""
        with self._lock:
            self._num_devices += 1

    def leave(self) -> None:
        """Count one device less; after the last one the thread ends once all has run."""
        with self._lock:
            self._num_devices -= 1
        self._inbox.put(None)

    def drop(self, timeout_seconds: float) -> None:
        """End the thread without running what is left, waiting for what it is in so long."""
        self._is_dropping = True
        self._inbox.put(None)
        if self._thread is not None and not self.is_current_thread:
            self._thread.join(timeout_seconds)

    def join(self, timeout_seconds: float | None) -> bool:
        """Wait for the thread if no device is left; False if it does not end in time."""
        if self._num_devices > 0 or self._thread is None or self.is_current_thread:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is called out of a work."""
        return self._thread is threading.current_thread()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop time: what is put meanwhile is put at one moment, however long it takes."""
        with self._lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holds -= 1
            self._inbox.put(None)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Sleep no more than it takes to let threads put."""
        with self._lock:
            self._num_hurries += 1
        self._inbox.put(None)
        try:
            yield
        finally:
            with self._lock:
                self._num_hurries -= 1

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="roundpipe emulated clock", daemon=True
                )
                self._thread.start()

    # ---- the thread: when

    def _serve(self) -> None:
        while True:
            self.thread_seconds = time.thread_time()
            at = self._next_event()
            if at < math.inf:
                if self._is_time_for(at):
                    self._advance(at)
                continue
            has_ended = self._num_devices <= 0 and self._num_open == 0
            if (has_ended or self._is_dropping) and self._inbox.empty():
                return
            self._anchor = math.nan
            self._take(self._inbox.get())

    def _next_event(self) -> float:
        timer = self._timers[0][0] if self._timers else math.inf
        return min(timer, self._links.next_end(self.now))

    def _is_time_for(self, at: float) -> bool:
        """Sleep until real time has come to ``at``; False if something was put meanwhile."""
        if self._is_dropping:
            return True
        if self._num_holds:
            self._take(self._inbox.get())
            return False
        real = time.perf_counter()
        if math.isnan(self._anchor):
            self._anchor = real
        pace = 0.0 if self._num_hurries else self.time_scale
        due = max(self._anchor + (at - self.now) * pace, self._stirred + _SETTLE_SECONDS)
        try:
            item = self._inbox.get(timeout=max(due - real, 0.0))
        except queue.Empty:
            return True
        self._take(item)
        return False

    def _advance(self, at: float) -> None:
        """Come to the next event, with all that follows from it at once."""
        at_latest = time.perf_counter() - _CATCH_UP_SECONDS
        self._anchor = max(self._anchor + (at - self.now) * self.time_scale, at_latest)
        self.now = at
        while self._timers and self._timers[0][0] <= at:
            self._move_bytes(heapq.heappop(self._timers)[2])
        for flow in self._links.take_ended(at):
            flow.then()
        self._settle()

    def _take(self, item: Entry | Callable[[], None] | None) -> None:
        """Take ``item`` and whatever else has come."""
        while True:
            if isinstance(item, Entry):
                self._num_open += 1
                item.put_seconds = self.now
                item.stream.queue.append(item)
                self._movable.append(item.stream)
            elif item is not None:
                item()
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
        self._settle()
        self._stirred = time.perf_counter()

    # ---- the thread: what

    def _settle(self) -> None:
        """Go on until nothing more happens at this moment.

        Copies start last: by then all that is ready now stands in line, in the order it was put.
        """
        while self._movable or self._startable:
            while self._movable:
                self._move(self._movable.popleft())
            if self._startable:
                self._start_copy(self._startable.popleft())

    def _move(self, stream: Stream) -> None:
        """Begin the head of a stream that has nothing under way."""
        if stream.current is not None or not stream.queue:
            return
        entry = stream.current = stream.queue.popleft()
        awaited = entry.awaited
        if awaited is None:
            self._begin(entry)
        elif self._is_dropping or awaited.is_complete():
            self._complete(entry)
        elif isinstance(awaited, Entry) and awaited.stream.clock is self:
            awaited.followers.append(entry)
        else:
            self._follow_foreign(entry, awaited)

    def _follow_foreign(self, entry: Entry, awaited: Event) -> None:
        """Have a thread wait for what this clock does not play."""

        def wait() -> None:
            awaited.wait()
            self._inbox.put(functools.partial(self._complete, entry))

        threading.Thread(target=wait, name="roundpipe emulated wait", daemon=True).start()

    def _begin(self, entry: Entry) -> None:
        """Run a work, then let it take its time."""
        load = None if self._is_dropping else self._run(entry)
        if load is None:
            entry.start_seconds = self.now
            self._complete(entry)
            self._stirred = time.perf_counter()  # it may have woken a thread of the host
            return
        entry.load, entry.start_seconds = load, self.now
        if load.seconds > 0:
            idle_since = max(entry.stream.free, entry.known)
            if math.isfinite(idle_since):
                self.late_seconds += max(entry.put_seconds - idle_since, 0.0)
            heapq.heappush(self._timers, (self.now + load.seconds, entry.serial, entry))
        else:
            self._move_bytes(entry)

    def _run(self, entry: Entry) -> Load | None:
        work, entry.work = entry.work, None
        assert work is not None
        begin = time.thread_time()
        try:
            load = work()
            if not isinstance(load, Load):
                return None
            entry.stream.holding.begin(load)
        except BaseException as error:
            entry.stream.holding.untold.tell(error, entry.on_error)
            return None
        else:
            return load
        finally:
            self.work_seconds += time.thread_time() - begin

    def _move_bytes(self, entry: Entry) -> None:
        """What comes after a work's seconds."""
        load = entry.load
        assert load is not None
        if not load.num_bytes:
            self._end(entry)
        elif load.way is Way.HOST:
            road = (-1, Way.HOST)
            self._links.add(Flow(road, load.num_bytes, functools.partial(self._end, entry)))
        else:
            road = (entry.stream.device, load.way)
            engine = self._engines.setdefault(road, _CopyEngine())
            heapq.heappush(engine.ready, (self.now, entry.serial, entry))
            self._startable.append(road)

    def _start_copy(self, road: Road) -> None:
        engine = self._engines[road]
        if engine.is_busy or not engine.ready:
            return
        engine.is_busy = True
        entry = heapq.heappop(engine.ready)[2]
        assert entry.load is not None
        if not entry.load.seconds:
            entry.start_seconds = self.now
        then = functools.partial(self._end_copy, road, entry)
        self._links.add(Flow(road, entry.load.num_bytes, then))

    def _end_copy(self, road: Road, entry: Entry) -> None:
        self._engines[road].is_busy = False
        self._startable.append(road)
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        assert entry.load is not None
        entry.stream.holding.end(entry.load)
        self._complete(entry)

    def _complete(self, entry: Entry) -> None:
        """Let whoever waits for ``entry`` go on."""
        over = [entry]
        while over:
            done = over.pop()
            stream, awaited = done.stream, done.awaited
            end = self.now
            if isinstance(awaited, Entry) and awaited.stream.clock is self:
                stream.free = max(stream.free, done.known, awaited.end_seconds)
            else:
                stream.free = end
            stream.current = None
            self._movable.append(stream)
            self._num_open -= 1
            over.extend(done.followers)
            done.followers = []
            if done.complete(end):
                self._stirred = time.perf_counter()
