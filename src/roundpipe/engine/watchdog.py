"""Notices that nothing goes on: the one timeout there is.

Whoever waits in the caller's thread waits here. As long as works finish on the pool, of whatever
model, waiting goes on; a wait of its own that timed out would only guess. Where devices compute on
the processor, what their activations lay in is given back to the system meanwhile: each thread's
share of the C library's memory keeps its own holes otherwise.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from typing import TYPE_CHECKING

from roundpipe.errors import StallError
from roundpipe.store.freed import FreedMemory

if TYPE_CHECKING:
    import threading

    from roundpipe.engine.pool import DevicePool

_POLL_SECONDS = 0.5


class Watchdog:
    """Watches a pool. ``stall_seconds``: how long nothing may finish."""

    def __init__(self, pool: DevicePool, stall_seconds: float) -> None:
        self.pool, self.stall_seconds = pool, stall_seconds
        self._freed = FreedMemory() if pool.computes_on_cpu else None

    def watch(self, ready: threading.Event) -> None:
        """Wait for ``ready``; raises StallError when nothing finishes, stacks on stderr."""
        if not self.is_set(ready, self.stall_seconds):
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            raise StallError(self._describe())

    def is_set(self, ready: threading.Event, seconds: float) -> bool:
        """Wait for ``ready``; False once nothing has finished for so long."""
        finished, since = self.pool.num_finished, time.monotonic()
        while not ready.wait(min(_POLL_SECONDS, seconds / 2)):
            if self._freed is not None:
                self._freed.add(1)
                self._freed.give_back()
            if self.pool.num_finished != finished:
                finished, since = self.pool.num_finished, time.monotonic()
            elif time.monotonic() - since > seconds:
                return False
        return True

    def _describe(self) -> str:
        lines = [f"nothing finished for {self.stall_seconds:g} s:"]
        for index, device in enumerate((*self.pool.devices, self.pool.host)):
            name = "host" if device is self.pool.host else f"device {index} ({device.name})"
            lines += [f"  {name} {stream}: {what}" for stream, what in device.describe().items()]
        lines.append("hint: the stacks of all threads are on standard error")
        return "\n".join(lines)
