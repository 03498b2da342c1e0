"""What is the emulated machine's own: how long things take, who shares what, full memory."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.emulated import EmulatedDevice, emulate
from roundpipe.device.emulated_links import Load, Rates, Way, fair_shares
from roundpipe.errors import DeviceError
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.sim.sharing import Road, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.device.emulated_stream import Entry

NEAR = 1e-9  # seconds: times count from a large number


def machine(
    count: int = 2,
    *,
    up: float = 10.0,
    down: float = 10.0,
    duplex: float = 1.0,
    cap: float | None = None,
    host: float = 1e9,
    memory: int = 1000,
) -> Machine:
    return Machine(
        cards=(Card(name="card", memory_bytes=memory, flops={}, bandwidth=1.0),) * count,
        links=(Link(up=up, down=down, duplex=duplex),) * count,
        host=Host(memory_bytes=1 << 40, bandwidth=host),
        link_cap=cap,
    )


class Rig:
    """Devices, and times counted from when they were made."""

    def __init__(self, machine: Machine, time_scale: float = 0.0) -> None:
        self.devices = emulate(machine, time_scale=time_scale)
        self.host = self.devices[0].host()
        self.clock = self.devices[0].clock
        self.start = self.clock.now

    def put(self, device: int, stream: str, load: Load) -> Entry:
        one = self.host if device < 0 else self.devices[device]
        entry = one.launch(stream, lambda: load, timed=True)
        assert entry is not None
        return entry

    def span(self, entry: Entry) -> tuple[float, float]:
        entry.wait()
        return (
            pytest.approx(entry.start_seconds - self.start, abs=NEAR),
            pytest.approx(entry.end_seconds - self.start, abs=NEAR),
        )

    def close(self) -> None:
        for device in (*self.devices, self.host):
            device.close()


@pytest.fixture
def rigged() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(time_scale: float = 0.0, **how: float) -> Rig:
        made.append(Rig(machine(**how), time_scale))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def up(num_bytes: float) -> Load:
    return Load(num_bytes=num_bytes, way=Way.UP)


def down(num_bytes: float) -> Load:
    return Load(num_bytes=num_bytes, way=Way.DOWN)


# ---- time


def test_work_starts_when_all_it_waits_for_is_over_and_lasts_what_it_says(rigged) -> None:
    rig = rigged()
    one, two = rig.devices
    with rig.clock.held():
        first = rig.put(0, "compute", Load(3.0))
        second = rig.put(0, "compute", Load(2.0))
        other = rig.put(1, "compute", Load(4.0))
        two.wait("compute", one.record("compute"))
        last = rig.put(1, "compute", Load(0.5))
    assert rig.span(first) == (0.0, 3.0)
    assert rig.span(second) == (3.0, 5.0)
    assert rig.span(other) == (0.0, 4.0)
    assert rig.span(last) == (5.0, 5.5)


def test_a_work_that_returns_no_load_takes_no_time(rigged) -> None:
    rig = rigged()
    entry = rig.devices[0].launch("compute", lambda: "something", timed=True)
    assert rig.span(entry) == (0.0, 0.0)


def test_a_chain_of_many_works_adds_no_time_of_its_own(rigged) -> None:
    rig = rigged()
    with rig.clock.held():
        for turn in range(200):
            here, there = rig.devices[turn % 2], rig.devices[1 - turn % 2]
            last = rig.put(turn % 2, "compute", Load(0.001))
            there.wait("compute", here.record("compute"))
    assert rig.span(last) == (0.199, 0.2)
    assert rig.clock.late_seconds == 0.0


def test_time_stands_still_while_nothing_is_under_way(rigged) -> None:
    rig = rigged(time_scale=1e-3)
    rig.span(rig.put(0, "compute", Load(1.0)))
    before = rig.clock.now
    for _ in range(3):  # each wakes the clock
        rig.devices[0].launch("other", lambda: None)
        rig.devices[0].record("other").wait()
    assert rig.clock.now == before


def test_time_stands_still_while_it_is_held(rigged) -> None:
    rig = rigged()
    with rig.clock.held():
        entry = rig.put(0, "compute", Load(1.0))
        rig.devices[1].launch("other", lambda: None)
        rig.devices[1].record("other").wait()
        assert not entry.is_complete()
        assert rig.clock.now == rig.start
    assert rig.span(entry) == (0.0, 1.0)


def test_what_is_put_too_late_is_counted(rigged) -> None:
    rig = rigged()
    with rig.clock.held():
        long, short = rig.put(0, "compute", Load(10.0)), rig.put(1, "compute", Load(1.0))
    short.wait()
    long.wait()
    assert rig.span(rig.put(1, "compute", Load(1.0))) == (10.0, 11.0)
    assert rig.clock.late_seconds == pytest.approx(9.0, abs=NEAR)


def test_what_could_not_start_before_is_not_late(rigged) -> None:
    rig = rigged()
    one, two = rig.devices
    with rig.clock.held():
        rig.put(1, "a", Load(1.0))
        rig.put(1, "b", Load(1.0))
        long = rig.put(0, "compute", Load(10.0))
        two.wait("a", one.record("compute"))
        rig.put(0, "compute", Load(10.0))
    long.wait()
    with rig.clock.held():
        at = rig.clock.now - rig.start  # 10, or 20 if this thread was slow
        two.wait("b", long)  # it is complete: nothing is put
        waited, known = rig.put(1, "a", Load(1.0)), rig.put(1, "b", Load(1.0))
    assert rig.span(waited)[1] == rig.span(known)[1]
    assert rig.clock.late_seconds == pytest.approx(2 * (at - 10.0), abs=NEAR)


def test_after_standing_still_time_goes_no_faster(rigged) -> None:
    rig = rigged(time_scale=0.01)
    rig.put(0, "compute", Load(1.0)).wait()
    idle = time.perf_counter() + 0.1
    while time.perf_counter() < idle:
        pass
    begin = time.perf_counter()
    rig.put(0, "compute", Load(10.0)).wait()
    assert time.perf_counter() - begin >= 0.095


def test_real_time_passes_as_the_scale_says_at_least(rigged) -> None:
    rig = rigged(time_scale=0.02)
    begin = time.perf_counter()
    rig.put(0, "compute", Load(5.0)).wait()
    assert time.perf_counter() - begin >= 0.1


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(DeviceError, match="time_scale must not be negative: -1"):
        emulate(machine(), time_scale=-1)


# ---- links


def test_a_copy_takes_its_bytes_over_the_rate_of_its_way(rigged) -> None:
    rig = rigged(up=10.0, down=5.0)
    with rig.clock.held():
        there, back = rig.put(0, "up", up(100)), rig.put(1, "down", down(100))
    assert rig.span(there) == (0.0, 10.0)
    assert rig.span(back) == (0.0, 20.0)


def test_copies_of_one_way_go_one_after_the_other_as_they_became_ready(rigged) -> None:
    rig = rigged()
    one = rig.devices[0]
    with rig.clock.held():
        rig.put(0, "compute", Load(5.0))
        one.wait("later", one.record("compute"))
        later = rig.put(0, "later", up(10))
        large = rig.put(0, "weights", up(100))
        small = rig.put(0, "activations", up(10))
    assert rig.span(large) == (0.0, 10.0)
    assert rig.span(small) == (10.0, 11.0)
    assert rig.span(later) == (11.0, 12.0)


def test_copies_that_are_ready_at_once_go_in_the_order_they_were_put(rigged) -> None:
    rig = rigged()
    one = rig.devices[0]
    with rig.clock.held():
        rig.put(0, "compute", Load(1.0))
        one.wait("b", one.record("compute"))
        first = rig.put(0, "b", up(10))
        one.wait("a", one.record("compute"))
        second = rig.put(0, "a", up(10))
    assert rig.span(first) == (1.0, 2.0)
    assert rig.span(second) == (2.0, 3.0)


def test_a_copy_of_nothing_waits_for_no_copy_engine(rigged) -> None:
    rig = rigged()
    with rig.clock.held():
        rig.put(0, "weights", up(100))
        nothing = rig.put(0, "activations", up(0))
    assert rig.span(nothing) == (0.0, 0.0)


def test_a_link_is_slower_while_both_ways_run(rigged) -> None:
    rig = rigged(duplex=0.5)
    with rig.clock.held():
        there, back = rig.put(0, "up", up(100)), rig.put(0, "down", down(20))
        other = rig.put(1, "up", up(100))
    assert rig.span(back) == (0.0, 4.0)
    assert rig.span(there) == (0.0, 12.0)  # 20 bytes in 4 s, then 80 in 8
    assert rig.span(other) == (0.0, 10.0)


def test_all_links_share_a_cap_each_way(rigged) -> None:
    rig = rigged(count=4, cap=20.0)
    with rig.clock.held():
        ups = [rig.put(device, "up", up(50)) for device in range(3)]
        alone = rig.put(3, "down", down(50))
    assert [rig.span(each) for each in ups] == [(0.0, 7.5)] * 3
    assert rig.span(alone) == (0.0, 5.0)


def test_copies_and_updates_share_host_memory(rigged) -> None:
    rig = rigged(host=18.0)
    with rig.clock.held():
        ups = [rig.put(device, "up", up(10)) for device in range(2)]
        update = rig.put(-1, "host", Load(num_bytes=80))
    # An update asks eight times as often: 14.4 of 18, the copies 1.8 each.
    assert rig.span(update) == (0.0, pytest.approx(80 / 14.4, abs=NEAR))
    copied = 1.8 * 80 / 14.4
    assert rig.span(ups[0]) == (0.0, pytest.approx(80 / 14.4 + (10 - copied) / 9, abs=NEAR))


def test_seconds_come_before_bytes(rigged) -> None:
    rig = rigged()
    entry = rig.put(0, "up", Load(2.0, num_bytes=10, way=Way.UP))
    assert rig.span(entry) == (0.0, 3.0)


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_those_of_the_simulator(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 8)
    what = machine(
        count,
        up=draw.uniform(5, 20),
        down=draw.uniform(5, 20),
        duplex=draw.uniform(0.4, 1.0),
        cap=draw.choice([None, draw.uniform(10, 100)]),
        host=draw.uniform(20, 200),
    )
    every = [(device, way) for device in range(count) for way in (Way.UP, Way.DOWN)]
    roads = [*draw.sample(every, draw.randint(1, len(every))), *[(-1, Way.HOST)] * seed]
    theirs = Sharing(what).rates([Road(device, up=way is not Way.DOWN) for device, way in roads])
    assert Rates(what).of(tuple(roads)) == pytest.approx(theirs)


def test_shares_leave_no_more_than_limits_do() -> None:
    assert fair_shares(10.0, [1.0, 20.0, 20.0], [1.0] * 3) == [1.0, 4.5, 4.5]
    assert fair_shares(100.0, [1.0, 20.0], [1.0] * 2) == [1.0, 20.0]
    assert fair_shares(9.0, [20.0, 20.0], [8.0, 1.0]) == [8.0, 1.0]


# ---- memory


def test_a_buffer_counts_as_what_it_stands_for(rigged) -> None:
    device = rigged(memory=1000).devices[0]
    buffer = device.allocate(4, counts_as=900)
    assert (buffer.numel(), device.allocated_bytes) == (4, 900)
    with pytest.raises(torch.OutOfMemoryError, match="101 bytes asked for, 900 of 1,000 in use"):
        device.allocate(4, counts_as=101)
    device.allocate(4, counts_as=100)
    device.free(buffer)
    assert (device.allocated_bytes, device.peak_bytes) == (100, 1000)


def test_works_hold_memory_from_their_start_to_whose_end_gives_it_back(rigged) -> None:
    rig = rigged(memory=1000)
    device = rig.devices[0]
    seen: list[int] = []
    with rig.clock.held():
        rig.put(0, "compute", Load(1.0, takes=300, needs=200))
        device.launch("compute", lambda: seen.append(device.allocated_bytes))
        rig.put(0, "compute", Load(1.0, takes=700))
        device.launch("compute", lambda: seen.append(device.allocated_bytes))
        last = rig.put(0, "compute", Load(1.0, gives=1000))
    last.wait()
    assert seen == [300, 1000]
    assert (device.allocated_bytes, device.peak_bytes) == (0, 1000)


@pytest.mark.parametrize("load", [Load(1.0, takes=1001), Load(1.0, takes=500, needs=501)])
def test_a_work_that_finds_no_memory_fails_and_takes_no_time(rigged, load: Load) -> None:
    rig = rigged(memory=1000)
    told: list[BaseException] = []
    entry = rig.devices[0].launch("compute", lambda: load, timed=True, on_error=told.append)
    assert rig.span(entry) == (0.0, 0.0)
    assert [type(error) for error in told] == [torch.OutOfMemoryError]
    assert (rig.devices[0].allocated_bytes, rig.devices[0].peak_bytes) == (0, 0)


def test_loads_that_nobody_will_give_back_can_be_forgotten(rigged) -> None:
    rig = rigged(memory=1000)
    device = rig.devices[0]
    device.allocate(4, counts_as=100)
    rig.put(0, "compute", Load(1.0, takes=300)).wait()
    device.forget_loads()
    assert device.allocated_bytes == 100
    rig.put(0, "compute", Load(1.0, gives=300)).wait()
    assert device.allocated_bytes == 100


def test_the_host_has_no_limit(rigged) -> None:
    rig = rigged(memory=1000)
    assert rig.host.allocate(4, counts_as=10**12).numel() == 4


# ---- threads


def clock_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("roundpipe emulated")]


def test_all_devices_of_a_machine_share_one_thread_which_begins_with_the_first_work() -> None:
    devices = emulate(machine(3))
    assert clock_threads() == []
    for device in devices:
        device.launch("compute", lambda: None)
    assert len(clock_threads()) == 1
    for device in devices:
        device.close()
    assert clock_threads() == []


def test_dropped_devices_run_what_was_launched_and_leave_no_thread() -> None:
    devices = emulate(machine(2), time_scale=0.0)
    ran: list[int] = []
    for device in devices:
        device.launch("compute", lambda: Load(5.0))
        device.launch("compute", lambda: ran.append(1))
    del device, devices
    for thread in clock_threads():
        thread.join(5)
    assert ran == [1, 1]
    assert clock_threads() == []


def test_close_does_not_sleep_for_what_is_left() -> None:
    (device,) = emulate(machine(1))
    entry = device.launch("compute", lambda: Load(1000.0), timed=True)
    device.close(timeout_seconds=30)
    assert entry is not None
    assert entry.is_complete()


def test_close_leaves_a_hung_work_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    (device,) = emulate(machine(1))
    gate = threading.Event()
    device.launch("compute", gate.wait)
    with caplog.at_level(logging.WARNING):
        device.close(timeout_seconds=0.01)
    assert "left behind at close: emulated:0.compute" in caplog.text
    gate.set()
    for thread in clock_threads():
        thread.join(5)
    assert clock_threads() == []


def test_close_called_by_a_work_of_the_machine_does_not_hang() -> None:
    (device,) = emulate(machine(1))
    closed = threading.Event()

    def close() -> None:
        device.close()
        closed.set()

    device.launch("compute", close)
    assert closed.wait(5)


@pytest.mark.slow
def test_a_process_ends_though_a_work_hangs_and_others_are_queued() -> None:
    script = """
import threading
import roundpipe.device.emulated as emulated
from roundpipe.plan.machine_text import parse_machine
emulated._EXIT_SECONDS = 0.05
device = emulated.emulate(parse_machine("1x4090"))[0]
device.launch("hung", threading.Event().wait)
device.launch("other", lambda: print("ran"))
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_describe_tells_running_waiting_and_idle_streams_apart(rigged) -> None:
    rig = rigged(time_scale=1.0)
    one, two = rig.devices
    one.launch("compute", lambda: Load(1000.0), label="F3.1")
    two.wait("compute", one.record("compute"))
    two.launch("idle", lambda: None)
    two.record("idle").wait()
    assert one.describe() == {"compute": "F3.1"}
    assert two.describe() == {"compute": "waiting for emulated:0.compute F3.1", "idle": "idle"}


def test_times_are_nan_until_a_work_is_over(rigged) -> None:
    rig = rigged()
    with rig.clock.held():
        entry = rig.put(0, "compute", Load(1.0))
        assert math.isnan(entry.end_seconds)
    entry.wait()
    assert entry.end_seconds - entry.start_seconds == pytest.approx(1.0, abs=NEAR)


def test_an_event_of_a_wait_completes_with_what_is_waited_for(rigged) -> None:
    rig = rigged()
    one, two = rig.devices
    with rig.clock.held():
        rig.put(0, "compute", Load(2.0))
        two.wait("compute", one.record("compute"))
        event = two.record("compute")
        two.wait("after", event)
        entry = rig.put(1, "after", Load(1.0))
    assert rig.span(entry) == (2.0, 3.0)
    assert event.end_seconds - rig.start == pytest.approx(2.0, abs=NEAR)


def test_runs_of_the_same_works_give_the_same_times(rigged) -> None:
    def play() -> list[float]:
        rig = rigged(count=3, duplex=0.5, cap=15.0, host=20.0)
        draw = random.Random(7)
        entries = []
        with rig.clock.held():
            for _ in range(60):
                device = draw.randrange(3)
                load = draw.choice([up(draw.randint(1, 50)), down(30), Load(draw.random())])
                entries.append(rig.put(device, draw.choice("abc"), load))
                rig.devices[draw.randrange(3)].wait(
                    draw.choice("abc"), rig.devices[device].record("a")
                )
        for entry in entries:
            entry.wait()
        return [entry.end_seconds - rig.start for entry in entries]

    runs = [play() for _ in range(3)]
    for one, other in pairwise(runs):
        assert one == pytest.approx(other, abs=NEAR)


def test_devices_are_told_apart_by_name() -> None:
    devices = emulate(machine(2))
    assert [device.name for device in devices] == ["emulated:0", "emulated:1"]
    assert repr(devices[1]) == "EmulatedDevice('emulated:1')"
    assert isinstance(devices[0], EmulatedDevice)
