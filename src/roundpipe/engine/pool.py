"""The devices, and the host threads that issue their work: what several models may share.

One thread issues for each device, one for what happens on the host, one brings results to callers.
The host is a device too, so that its work is ordered by the same events.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from roundpipe.device.cores import host_threads, usable_cores
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CudaDevice, card_facts
from roundpipe.device.emulated import EmulatedDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.device.numa import cores_near, stay_on
from roundpipe.device.resolve import resolve_devices
from roundpipe.engine.program import HOST
from roundpipe.engine.worker import Worker
from roundpipe.store.pages import HostPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.device.api import Device

RESULTS = -2  # the worker that brings results to callers
_CLOSE_SECONDS = 5.0


class DevicePool:
    """Devices with their threads.

    ``devices`` as in ``RoundPipe``: ``"auto"``, a number, ``"cuda:0"``, ``"cpu*3"``, a list.
    ``pinned_memory_limit``: bytes of host memory to page-lock at most; None: nine tenths of it.
    Raises DeviceError for a device that cannot be used. End it with ``close`` or ``with``; dropped
    without, its threads end once their work is done.
    """

    def __init__(self, devices: Any = "auto", *, pinned_memory_limit: int | None = None) -> None:
        self.devices: Sequence[Device] = resolve_devices(devices)
        self.host: Device = _host_for(self.devices)
        self.pages = HostPages.for_devices(self.devices, limit_bytes=pinned_memory_limit)
        names = [*range(len(self.devices)), HOST, RESULTS]
        self._workers = {name: Worker(_title(name)) for name in names}
        self.lock = threading.Lock()  # who starts runs: one caller at a time
        self.num_finished = 0  # works that have run; only whether it changes matters
        for index, device in enumerate(self.devices):
            if isinstance(device, CudaDevice):
                near = cores_near(card_facts(device.torch_device).bus)
                self._workers[index].put(functools.partial(_stay, near))
        every = [*self.devices, self.host]
        self._finalizer = weakref.finalize(self, _close, self._workers, every, self.pages)

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DevicePool({[device.name for device in self.devices]})"

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has run."""
        return not self._finalizer.alive

    @property
    def is_emulated(self) -> bool:
        """Whether its devices are those of an emulated machine."""
        return isinstance(self.host, EmulatedDevice)

    @property
    def computes_on_cpu(self) -> bool:
        """Whether every device really computes on this machine's processor."""
        on_cpu = all(device.torch_device.type == "cpu" for device in self.devices)
        return on_cpu and not self.is_emulated

    def worker(self, name: int) -> Worker:
        """The thread that issues for a device, ``HOST`` or ``RESULTS``."""
        return self._workers[name]

    def device(self, name: int) -> Device:
        """The device a worker issues to."""
        return self.devices[name] if name >= 0 else self.host

    def close(self) -> None:
        """Finish what was issued and end all threads. Idempotent."""
        self._finalizer()


def _host_for(devices: Sequence[Device]) -> Device:
    fakes = [device for device in devices if isinstance(device, FakeDevice)]
    if fakes:
        first = fakes[0]
        return FakeDevice(
            "host", ledger=first.ledger, fail=first.fail, watch_storage=first.watch_storage
        )
    emulated = next((one for one in devices if isinstance(one, EmulatedDevice)), None)
    if emulated is not None:
        return emulated.host()
    # Beside devices that compute on the same cores one thread is enough, and many would fight them.
    on_cpu = any(device.torch_device.type == "cpu" for device in devices)
    return CpuDevice("host", threads=1 if on_cpu else host_threads(usable_cores()))


def _stay(cores: frozenset[int]) -> None:
    stay_on(cores)


def _title(name: int) -> str:
    return {HOST: "host", RESULTS: "results"}.get(name, f"device {name}")


def _close(workers: dict[int, Worker], devices: Sequence[Device], pages: HostPages) -> None:
    """End everything; what hangs is left behind after a few seconds for all of it."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    for worker in workers.values():
        worker.close(max(0.0, deadline - time.monotonic()))
    failures: list[Exception] = []
    for device in devices:
        try:
            device.close(timeout_seconds=max(0.0, deadline - time.monotonic()))
        except Exception as error:  # the others are to end all the same
            failures.append(error)
    pages.close()
    if failures:
        raise failures[0]
