"""What is the CPU device's own: threads, latches, delays, what is left behind."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice, CpuEvent, _end_at_exit
from roundpipe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")]


def stream_threads_end() -> bool:
    for thread in threading.enumerate():
        if thread.name.startswith("roundpipe"):
            thread.join(5)
    return not stream_threads()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def test_a_device_has_no_thread_before_its_first_launch() -> None:
    device = CpuDevice("cpu")
    assert stream_threads() == []
    device.close()


def test_each_stream_is_one_daemon_thread_with_its_name() -> None:
    device = CpuDevice("cpu:1", threads=1)
    for _ in range(3):
        device.launch("compute", lambda: None)
        device.launch("weights", lambda: None)
    assert sorted(stream_threads()) == ["roundpipe cpu:1 compute", "roundpipe cpu:1 weights"]
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("roundpipe"))
    device.close()
    assert stream_threads() == []


def test_a_dropped_device_runs_what_was_launched_and_leaves_no_thread() -> None:
    device = CpuDevice(threads=1)
    gate = threading.Event()
    ran: list[str] = []
    device.launch("compute", gate.wait)
    device.launch("compute", lambda: ran.append("after"))
    del device
    gate.set()
    assert stream_threads_end()
    assert ran == ["after"]


@pytest.mark.slow
def test_a_process_ends_though_a_stream_hangs_and_works_are_queued() -> None:
    script = """
import threading, torch
from roundpipe.device.cpu import CpuDevice
import roundpipe.device.cpu as cpu
cpu._EXIT_SECONDS = 0.05
device = CpuDevice(threads=1)
device.launch("hung", threading.Event().wait)
device.launch("behind", lambda: None)
device.wait("behind", device.record("hung"))
for _ in range(1000):
    device.launch("busy", lambda: torch.randn(200, 200) @ torch.randn(200, 200))
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_close_leaves_a_hung_stream_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = CpuDevice("cpu", threads=1)
    gate = threading.Event()
    device.launch("compute", gate.wait)
    with caplog.at_level(logging.WARNING):
        device.close(timeout_seconds=0.01)
    assert "left behind at close: roundpipe cpu compute" in caplog.text
    gate.set()
    assert stream_threads_end()


def test_close_called_by_work_of_the_device_itself_does_not_hang() -> None:
    device = CpuDevice(threads=1)
    told: list[BaseException] = []
    device.launch("compute", device.close, on_error=told.append)
    assert stream_threads_end()
    assert told == []


def test_what_is_queued_when_the_process_ends_does_not_run_but_completes() -> None:
    device = CpuDevice(threads=1)
    ran: list[str] = []

    def run_until_the_end() -> None:
        while not device._streams["compute"].abandoned:
            pass

    device.launch("compute", run_until_the_end)
    device.launch("compute", lambda: ran.append("queued"))
    event = device.record("compute")
    _end_at_exit(device._streams)
    assert stream_threads() == []
    assert event.is_complete()
    assert ran == []
    device.close()


def test_the_number_of_threads_is_the_streams_own() -> None:
    caller, other = torch.get_num_threads(), torch.get_num_threads() + 1
    device = CpuDevice("cpu", threads=other)
    inside: list[int] = []
    device.launch("compute", lambda: inside.append(torch.get_num_threads()))
    device.record("compute").wait()
    assert inside == [other]
    assert torch.get_num_threads() == caller
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == caller, "threads born later"
    assert device.threads == other
    device.close()


def test_a_device_without_a_number_takes_the_callers() -> None:
    device = CpuDevice()
    assert device.threads == torch.get_num_threads()
    with pytest.raises(DeviceError, match="at least one thread: 0"):
        CpuDevice(threads=0)


def test_grad_mode_and_autocast_of_the_caller_stay_with_the_caller() -> None:
    device = CpuDevice(threads=1)
    seen: list[tuple[bool, bool]] = []
    with torch.no_grad(), torch.autocast("cpu"):
        device.launch(
            "compute",
            lambda: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))),
        )
        device.record("compute").wait()
    assert seen == [(True, False)]
    device.close()


def test_a_launch_is_its_own_event_and_a_complete_one_queues_nothing() -> None:
    device = CpuDevice(threads=1)
    timing = device.launch("compute", lambda: None, timed=True)
    event = device.record("compute")
    assert event is timing
    event.wait()
    last = device.record("weights")
    device.wait("weights", event)
    assert device.record("weights") is last, "nothing was put on the stream"
    gate = threading.Event()
    device.launch("compute", gate.wait)
    own = device.record("compute")
    device.wait("compute", own)
    assert device.record("compute") is own, "a stream is in order by itself"
    gate.set()
    device.close()


def test_an_event_of_a_wait_completes_after_what_is_waited_for() -> None:
    device = CpuDevice(threads=1)
    gate = threading.Event()
    device.launch("a", gate.wait)
    device.wait("b", device.record("a"))
    event = device.record("b")
    assert not event.is_complete()
    assert math.isnan(event.end_seconds)
    gate.set()
    event.wait()
    assert device.record("a").end_seconds <= event.end_seconds
    device.close()


def test_one_event_wakes_all_who_wait() -> None:
    device = CpuDevice(threads=1)
    gate = threading.Event()
    device.launch("a", gate.wait)
    event = device.record("a")
    assert isinstance(event, CpuEvent)
    for stream in "bcde":
        device.wait(stream, event)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(event.wait) for _ in range(4)]
        gate.set()
        for future in waiting:
            future.result(timeout=5)
    for stream in "bcde":
        device.record(stream).wait()
    device.close()


def test_describe_tells_running_waiting_and_idle_streams_apart() -> None:
    device = CpuDevice("cpu:0", threads=1)
    gate, started = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait()

    device.launch("compute", hang, label="F3.1")
    device.wait("weights", device.record("compute"))
    device.launch("idle", lambda: None)
    device.record("idle").wait()
    started.wait()
    expected = {
        "compute": "F3.1",
        "weights": "waiting for cpu:0.compute F3.1",
        "idle": "idle",
    }
    assert eventually(lambda: device.describe() == expected), device.describe()
    gate.set()
    device.close()


def test_delays_are_drawn_from_the_seed_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(seed: int) -> dict[str, list[float]]:
        slept: dict[str, list[float]] = {}

        def sleep(seconds: float) -> None:
            slept.setdefault(threading.current_thread().name, []).append(seconds)

        device = CpuDevice(threads=1, max_delay_seconds=2.0, seed=seed)
        with monkeypatch.context() as patch:
            patch.setattr("roundpipe.device.cpu.time.sleep", sleep)
            for stream in ("a", "b"):
                for _ in range(5):
                    device.launch(stream, lambda: None)
            device.close()
        return slept

    first = delays(1)
    assert first == delays(1)
    assert first != delays(2)
    a, b = first.values()
    assert a != b
    assert all(0 <= seconds < 2 for seconds in a + b)
    assert len(a) == len(b) == 5


def test_a_missing_wait_is_a_real_bug_here() -> None:
    device = CpuDevice(threads=1)
    buffer, gate = torch.zeros(8), threading.Event()

    def write() -> None:
        gate.wait()
        buffer.fill_(1)

    seen: list[float] = []
    device.launch("up", write)
    device.launch("compute", lambda: seen.append(float(buffer.sum())))  # no wait for "up"
    device.record("compute").wait()
    gate.set()
    device.close()
    assert seen == [0.0]


def test_pages_of_a_fresh_buffer_are_zero_unless_poisoned() -> None:
    device = CpuDevice(threads=1)
    assert not bool(device.allocate(10_000).any())
    kept = device.allocate(16)
    device.poison(kept)
    device.free(kept)
    assert not bool(kept.any()), "poison is for devices that were made to"
    device.close()


def test_host_memory_that_is_not_there_is_out_of_memory_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    device = CpuDevice(threads=1)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="out of host memory: 1,000 bytes"):
        device.allocate(1000)
    assert device.allocated_bytes == 0
    device.close()
