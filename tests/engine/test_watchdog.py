from __future__ import annotations

import threading

import pytest

from roundpipe.engine import watchdog as watchdog_module
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.watchdog import Watchdog
from roundpipe.errors import StallError


@pytest.fixture
def pool():
    with DevicePool("cpu*2") as made:
        yield made


def test_what_is_ready_is_waited_for_no_longer(pool):
    ready = threading.Event()
    ready.set()
    Watchdog(pool, 0.01).watch(ready)


def test_nothing_finishing_for_so_long_is_a_stall_that_tells_of_every_stream(pool, capfd):
    gate = threading.Event()
    pool.devices[0].launch("compute", gate.wait, label="F3.1")
    pool.devices[1].wait("weights", pool.devices[0].record("compute"))
    with pytest.raises(StallError) as caught:
        Watchdog(pool, 0.05).watch(threading.Event())
    gate.set()
    assert str(caught.value) == (
        "nothing finished for 0.05 s:\n"
        "  device 0 (cpu:0) compute: F3.1\n"
        "  device 1 (cpu:1) weights: waiting for cpu:0.compute F3.1\n"
        "hint: the stacks of all threads are on standard error"
    )
    assert "test_nothing_finishing" in capfd.readouterr().err


class Slowly:
    """An event whose every wait takes 6 s by a clock of its own."""

    def __init__(self, pool, finishing):
        self.pool, self.finishing, self.now = pool, finishing, 0.0

    def wait(self, timeout):
        assert timeout == 0.5
        self.now += 6.0
        self.pool.num_finished += next(self.finishing, 0)
        return self.now >= 60.0


@pytest.mark.parametrize(
    ("finishing", "stalls"),
    [
        ([1, 0, 1, 0, 1, 0, 1, 0, 1], False),
        ([1] * 9, False),
        ([1, 1, 0, 0, 1, 1], True),
        ([], True),
    ],
)
def test_only_a_time_in_which_nothing_finishes_counts(pool, monkeypatch, finishing, stalls):
    ready = Slowly(pool, iter(finishing))
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: ready.now)
    assert Watchdog(pool, 600).is_set(ready, 10.0) is not stalls


def test_a_wait_gives_back_what_devices_on_the_processor_have_freed(pool, monkeypatch):
    calls = []
    watchdog = Watchdog(pool, 0.02)
    assert watchdog._freed is not None
    monkeypatch.setattr(watchdog._freed, "_trim", calls.append)
    assert not watchdog.is_set(threading.Event(), 0.02)
    assert calls


def test_a_wait_for_other_devices_gives_nothing_back():
    with DevicePool("emulated:2x4090,64GB") as emulated:
        assert Watchdog(emulated, 1.0)._freed is None
