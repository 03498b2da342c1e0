"""What the CPU device costs per action: launch, record, another stream's wait, hand-off of threads.

    python benchmarks/device_overhead.py [repeats]

Prints microseconds, the least of several rounds. "issue" is the Python that the issuing thread
spends; "hand-off" is one work on each of two streams in turn, each waiting for the other: what a
dependent pair of actions costs from end to end.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from roundpipe.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7


def nothing() -> None:
    """Stand in for an action."""


def least_microseconds(run: Callable[[int], float], repeats: int) -> float:
    """The least time of one repeat over ``ROUNDS`` rounds; ``run`` returns seconds."""
    return min(run(repeats) for _ in range(ROUNDS)) / repeats * 1e6


def issue(device: CpuDevice, *, after_open_event: bool) -> Callable[[int], float]:
    """Launch, record, and another stream's wait, as the issuing thread sees it."""

    def run(repeats: int) -> float:
        gate = threading.Lock()
        gate.acquire()
        if after_open_event:  # keep the stream busy, so that every event is open when waited for
            device.launch("compute", gate.acquire)
        start = time.perf_counter()
        for _ in range(repeats):
            device.launch("compute", nothing, reads=(), writes=(), timed=True, label="F3.1")
            device.wait("weights", device.record("compute"))
        seconds = time.perf_counter() - start
        gate.release()
        device.record("compute").wait()
        device.record("weights").wait()
        return seconds

    return run


def hand_off(device: CpuDevice) -> Callable[[int], float]:
    """Two streams in turn, each waiting for the other."""

    def run(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats // 2):
            device.launch("a", nothing)
            device.wait("b", device.record("a"))
            device.launch("b", nothing)
            device.wait("a", device.record("b"))
        device.record("b").wait()
        return time.perf_counter() - start

    return run


def main() -> None:
    """Measure and print."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    device = CpuDevice(threads=1)
    for name, run in (
        ("issue, event still open", issue(device, after_open_event=True)),
        ("issue, stream running", issue(device, after_open_event=False)),
        ("hand-off between threads", hand_off(device)),
    ):
        print(f"{name:28} {least_microseconds(run, repeats):6.2f} us")
    device.close()


if __name__ == "__main__":
    main()
