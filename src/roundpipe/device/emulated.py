"""Devices of a machine one does not have: real work, run in the emulated machine's time.

The engine cannot tell them from others: streams run in order, events order them, memory runs out.
What a work takes is what it returns: a `Load` says how long its stream is taken, how many bytes
then go over the device's link or through the host's memory, and what they hold of the device's
memory. A work that returns anything else takes no time. See ``emulated_clock`` for how time goes
and ``emulated_links`` for who gets how much of a link.

Tensors are the host's, and may be much smaller than what they stand for: ``counts_as`` is what a
buffer takes of the card, byte by byte.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

from roundpipe.device.emulated_clock import Clock
from roundpipe.device.emulated_stream import Entry, Holding, Stream
from roundpipe.device.memory import Accounts, HostMemory
from roundpipe.device.untold import Untold
from roundpipe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event
    from roundpipe.plan.machine import Machine

logger = logging.getLogger(__name__)

HOST_INDEX = -1
_EXIT_SECONDS = 2.0  # how long a process that ends waits for the work under way


def emulate(
    machine: Machine, *, time_scale: float = 1.0, poison_released: bool = False
) -> list[EmulatedDevice]:
    """The devices of ``machine``, which share one clock.

    ``time_scale``: real seconds that one emulated second takes, at least as far as the work itself
    does not take longer; 0.1 is ten times as fast as the machine. ``poison_released``: for tests,
    see ``CpuDevice``. Raises DeviceError for a negative ``time_scale``.
    """
    if not time_scale >= 0:
        raise DeviceError(f"time_scale must not be negative: {time_scale}\nhint: time_scale=0.1")
    clock = Clock(machine, time_scale=time_scale)
    return [
        EmulatedDevice(f"emulated:{index}", clock, index, poison_released=poison_released)
        for index in range(machine.num_devices)
    ]


class EmulatedDevice:
    """One device of an emulated machine, or its host (``index`` -1). Made by `emulate`.

    Times are seconds of the emulated machine, see ``clock.now``.
    """

    def __init__(
        self, name: str, clock: Clock, index: int, *, poison_released: bool = False
    ) -> None:
        self.clock, self.index = clock, index
        self._name = name
        capacity = None if index == HOST_INDEX else clock.machine.cards[index].memory_bytes
        self._memory = HostMemory(Accounts(name, capacity), poison=poison_released)
        self._holding = Holding(self._memory.accounts, Untold())
        self._streams: dict[str, Stream] = {}
        self._making = threading.Lock()
        clock.enter()
        exit_hook = functools.partial(_end_at_exit, clock)
        atexit.register(exit_hook)
        self._finalizer = weakref.finalize(self, _leave, clock, exit_hook)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"EmulatedDevice({self._name!r})"

    def host(self) -> EmulatedDevice:
        """A device for what happens on the machine's host: the same clock, no card."""
        return EmulatedDevice("host", self.clock, HOST_INDEX)

    @property
    def name(self) -> str:
        """See Device."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("cpu")

    @property
    def allocated_bytes(self) -> int:
        """See Device. With what loads have taken and not given back."""
        return self._memory.accounts.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """See Device."""
        return self._memory.accounts.peak_bytes

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
    ) -> Entry | None:
        """See Device. What ``work`` returns says what it takes, see the module docstring."""
        target = self._streams.get(stream) or self._make(stream)
        entry = Entry(target, work, label=label, on_error=on_error)
        self.clock.put(entry)
        return entry if timed else None

    def record(self, stream: str) -> Entry:
        """See Device. Puts nothing."""
        target = self._streams.get(stream) or self._make(stream)
        if target.last is None:
            target.last = Entry(target)
            target.last.complete(self.clock.now)
        return target.last

    def wait(self, stream: str, event: Event) -> None:
        """See Device. Puts nothing if the event is complete or of this very stream."""
        target = self._streams.get(stream) or self._make(stream)
        if event.is_complete():
            if isinstance(event, Entry) and event.stream.clock is self.clock:
                target.known = max(target.known, event.end_seconds)
        elif not (isinstance(event, Entry) and event.stream is target):
            self.clock.put(Entry(target, awaited=event))

    def allocate(self, num_bytes: int, *, counts_as: int | None = None) -> Tensor:
        """See Device. ``counts_as``: bytes of the card that the buffer stands for."""
        return self._memory.allocate(num_bytes, counts_as=counts_as)

    def free(self, buffer: Tensor) -> None:
        """See Device."""
        self._memory.free(buffer)

    def forget_loads(self) -> None:
        """Give back the memory that works took for others that will not run any more.

        Nothing may be under way.
        """
        self._holding.forget()

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
        """See Device. What is put holds its tensors by itself."""

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """See Device. Nothing is checked here."""

    def disown(self, key: Hashable) -> None:
        """See Device. Nothing is checked here."""

    def describe(self) -> Mapping[str, str]:
        """See Device."""
        return {name: stream.describe() for name, stream in tuple(self._streams.items())}

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """See Device. What is left runs without sleeping."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._finalizer()
        with self.clock.hurried():
            left = self._unfinished(deadline)
            if not left and not self.clock.join(_left(deadline)):
                left = ["clock"]
        if left:
            logger.warning("%s: left behind at close: %s", self._name, ", ".join(left))
        self._streams.clear()  # so that a launch after this finds none and cannot be lost
        self._holding.untold.raise_first()

    def _unfinished(self, deadline: float | None) -> list[str]:
        """Wait for everything that was put; the streams that did not come to their end in time."""
        if self.clock.is_current_thread:
            return []
        return [
            stream.name
            for stream in self._streams.values()
            if stream.last is not None and not stream.last.wait_for(_left(deadline))
        ]

    def _make(self, name: str) -> Stream:
        with self._making:
            if not self._finalizer.alive:
                raise DeviceError(f"device is closed: {self._name}")
            if name not in self._streams:
                full = f"{self._name}.{name}"
                self._streams[name] = Stream(full, self.index, self._holding, self.clock)
            return self._streams[name]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _leave(clock: Clock, exit_hook: Callable[[], None]) -> None:
    """Take a device out of its machine; runs wherever the collector does."""
    atexit.unregister(exit_hook)
    clock.leave()


def _end_at_exit(clock: Clock) -> None:
    """Drop what is left: a daemon inside torch must not see Python go."""
    clock.drop(_EXIT_SECONDS)
