"""What every kind of device must do; each test runs on all of them."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CudaDevice
from roundpipe.device.emulated import EmulatedDevice, emulate
from roundpipe.device.fake import FakeDevice
from roundpipe.errors import DeviceError
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.store.pages import PAGE, Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.device.api import Device

    Make = Callable[..., Device]


def make_cpu(**limits: int) -> Device:
    return CpuDevice("cpu", threads=1, poison_released=True, **limits)


def make_fake(**limits: int) -> Device:
    return FakeDevice("fake", **limits)


def make_cuda(**limits: int) -> Device:
    return CudaDevice(0, poison_released=True, **limits)


def make_emulated(*, capacity_bytes: int = 1 << 30) -> Device:
    machine = Machine(
        cards=(Card(name="card", memory_bytes=capacity_bytes, flops={}, bandwidth=1e12),),
        links=(Link(up=1e9, down=1e9),),
        host=Host(memory_bytes=1 << 40, bandwidth=1e11),
    )
    (device,) = emulate(machine, poison_released=True)
    return device


KINDS = [
    pytest.param(make_cpu, id="cpu"),
    pytest.param(make_emulated, id="emulated"),
    pytest.param(make_fake, id="fake"),
    pytest.param(
        make_cuda,
        id="cuda",
        marks=[
            pytest.mark.gpu(n=1),
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
def device(make: Make) -> Iterator[Device]:
    device = make()
    yield device
    device.close()


def test_work_of_one_stream_runs_in_order(device: Device) -> None:
    ran: list[int] = []
    for i in range(20):
        device.launch("compute", lambda i=i: ran.append(i))
    device.record("compute").wait()
    assert ran == list(range(20))


def test_an_event_of_an_unused_stream_is_complete(device: Device) -> None:
    event = device.record("compute")
    event.wait()
    assert event.is_complete()


def test_an_event_is_complete_once_waited_for(device: Device) -> None:
    device.launch("compute", lambda: None)
    event = device.record("compute")
    event.wait()
    assert event.is_complete()


def test_a_stream_that_waits_sees_what_the_other_wrote(device: Device) -> None:
    buffer = device.allocate(1 << 16)
    result = torch.zeros(1 << 16, dtype=torch.uint8)
    device.launch("up", lambda: buffer.fill_(7), writes=["b"])
    device.wait("compute", device.record("up"))
    device.launch("compute", lambda: buffer.add_(1), writes=["b"])
    device.wait("down", device.record("compute"))
    device.launch("down", lambda: result.copy_(buffer), reads=["b"], writes=["r"])
    device.record("down").wait()
    assert bool((result == 8).all())
    device.free(buffer)


def test_a_stream_waits_for_an_event_of_another_device(make: Make) -> None:
    one, two = make(), make()
    ran: list[str] = []
    for turn in range(10):
        one.launch("compute", lambda turn=turn: ran.append(f"one {turn}"))
        two.wait("compute", one.record("compute"))
        two.launch("compute", lambda turn=turn: ran.append(f"two {turn}"))
        one.wait("compute", two.record("compute"))
    one.record("compute").wait()
    assert ran == [f"{name} {turn}" for turn in range(10) for name in ("one", "two")]
    one.close()
    two.close()


def test_a_stream_waits_for_an_event_of_another_kind_of_device(device: Device) -> None:
    host = CpuDevice("host", threads=1)
    ran: list[str] = []
    host.launch("work", lambda: ran.append("host"))
    device.wait("compute", host.record("work"))
    device.launch("compute", lambda: ran.append("device"))
    device.record("compute").wait()
    assert ran == ["host", "device"]
    host.close()


def test_a_stream_may_wait_for_its_own_event(device: Device) -> None:
    device.launch("compute", lambda: None)
    device.wait("compute", device.record("compute"))
    device.launch("compute", lambda: None)
    device.record("compute").wait()


def test_times_are_seconds_of_the_devices_clock(device: Device) -> None:
    # A card's clock is tied to the host's to within a few microseconds.
    slack = 1e-3 if device.torch_device.type == "cuda" else 0.0
    clock = time.perf_counter
    if isinstance(device, EmulatedDevice):  # its machine has a clock of its own
        clock = functools.partial(getattr, device.clock, "now")
    before = clock()
    first = device.launch("compute", lambda: None, timed=True)
    second = device.launch("compute", lambda: None, timed=True)
    device.record("compute").wait()
    after = clock()
    assert first is not None
    assert second is not None
    times = [
        *(before - slack, first.start_seconds, first.end_seconds),
        *(second.start_seconds, second.end_seconds, after + slack),
    ]
    assert times == sorted(times)


def test_work_that_is_not_timed_has_no_times(device: Device) -> None:
    assert device.launch("compute", lambda: None) is None


def fail() -> None:
    raise ZeroDivisionError("of the work")


def test_an_exception_goes_to_on_error_and_the_stream_goes_on(device: Device) -> None:
    told: list[BaseException] = []
    ran: list[str] = []
    device.launch("compute", fail, on_error=told.append)
    device.launch("compute", lambda: ran.append("later"))
    device.record("compute").wait()
    assert [str(error) for error in told] == ["of the work"]
    assert ran == ["later"]


def test_an_exception_is_told_before_the_work_counts_as_complete(device: Device) -> None:
    seen: list[bool] = []
    told: list[BaseException] = []
    device.launch("compute", fail, on_error=told.append)
    device.wait("other", device.record("compute"))
    device.launch("other", lambda: seen.append(bool(told)))
    device.record("other").wait()
    assert seen == [True]


def test_the_first_exception_nobody_was_told_of_is_raised_by_close_once(make: Make) -> None:
    device = make()
    device.launch("compute", fail)
    device.launch("compute", [].pop)
    with pytest.raises(ZeroDivisionError, match="of the work"):
        device.close()
    device.close()


def test_what_on_error_raises_is_raised_by_close(make: Make) -> None:
    device = make()

    def confused(error: BaseException) -> None:
        raise LookupError("in on_error") from error

    device.launch("compute", fail, on_error=confused)
    with pytest.raises(LookupError, match="in on_error"):
        device.close()


def test_close_runs_what_was_launched(make: Make) -> None:
    device = make()
    ran: list[int] = []
    for i in range(20):
        device.launch("compute", lambda i=i: ran.append(i))
    device.close()
    assert len(ran) == 20


def test_nothing_can_be_put_on_a_closed_device(make: Make) -> None:
    device = make()
    device.launch("compute", lambda: None)
    event = device.record("compute")
    device.close()
    event.wait()
    with pytest.raises(DeviceError, match="device is closed: "):
        device.launch("compute", lambda: None)
    with pytest.raises(DeviceError, match="device is closed: "):
        device.record("compute")


def test_a_closure_is_let_go_once_it_has_run(device: Device) -> None:
    class Held:
        pass

    held = Held()
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    device.launch("compute", lambda held=held: None)
    del held
    device.record("compute").wait()
    assert gone.wait(5)


def test_every_stream_says_what_it_does(device: Device) -> None:
    device.launch("compute", lambda: None, label="F3.1")
    device.record("compute").wait()
    deadline = time.monotonic() + 5
    while device.describe()["compute"] != "idle":  # a thread may not be back at its queue yet
        assert time.monotonic() < deadline
    assert set(device.describe()) == {"compute"}


def test_a_label_may_be_anything_that_has_a_text(device: Device) -> None:
    device.launch("compute", lambda: None, label=("F", 3, 1))
    device.record("compute").wait()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 100_000])
def test_buffers_are_aligned_bytes_on_the_device(device: Device, size: int) -> None:
    buffer = device.allocate(size)
    assert buffer.shape == (size,)
    assert buffer.dtype is torch.uint8
    assert buffer.device == device.torch_device
    assert buffer.data_ptr() % 256 == 0
    assert device.allocated_bytes == size
    device.free(buffer)
    assert device.allocated_bytes == 0


def test_the_peak_outlives_the_buffers(device: Device) -> None:
    one, two = device.allocate(1000), device.allocate(500)
    device.free(one)
    three = device.allocate(100)
    assert (device.allocated_bytes, device.peak_bytes) == (600, 1500)
    device.free(two)
    device.free(three)
    assert (device.allocated_bytes, device.peak_bytes) == (0, 1500)


def test_a_buffer_goes_back_once_and_where_it_came_from(device: Device) -> None:
    buffer = device.allocate(1000)
    with pytest.raises(ValueError, match="not a buffer of"):
        device.free(torch.zeros(1000, dtype=torch.uint8))
    device.free(buffer)
    with pytest.raises(ValueError, match="freed already"):
        device.free(buffer)


def test_a_buffer_of_negative_size_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="negative size: -1"):
        device.allocate(-1)


def test_capacity_is_a_limit_that_a_refusal_does_not_lower(make: Make) -> None:
    device = make(capacity_bytes=1000)
    buffer = device.allocate(800)
    with pytest.raises(torch.OutOfMemoryError, match="201 bytes asked for, 800 of 1,000 in use"):
        device.allocate(201)
    assert (device.allocated_bytes, device.peak_bytes) == (800, 800)
    device.free(device.allocate(200))
    device.free(buffer)
    device.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_nan_in_every_float_dtype(device: Device, dtype: torch.dtype) -> None:
    fresh = device.allocate(512)
    assert bool(fresh.view(dtype).isnan().all())
    view = fresh[256:].view(dtype)
    device.launch("compute", fresh.zero_)
    device.launch("compute", lambda: device.poison(view))
    device.record("compute").wait()
    assert bool(view.isnan().all())
    assert not bool(fresh[:256].any())
    device.launch("compute", fresh.zero_)
    device.record("compute").wait()
    device.free(fresh)
    device.record("compute").wait()
    assert bool(fresh.view(dtype).isnan().all())


def test_host_memory_is_page_locked_only_where_that_makes_copies_faster(device: Device) -> None:
    assert device.pins is (device.torch_device.type == "cuda")
    if not device.pins:
        return
    block = Block(5 * PAGE)
    device.register(block.address, block.whole_bytes)
    assert block.tensor.is_pinned()
    with pytest.raises(DeviceError, match="already"):
        device.register(block.address, block.whole_bytes)
    buffer = device.allocate(5 * PAGE)
    block.tensor.fill_(7)
    device.launch("up", lambda: buffer.copy_(block.tensor, non_blocking=True))
    device.record("up").wait()
    assert bool((buffer == 7).all())
    device.free(buffer)
    device.unregister(block.address)
    assert not block.tensor.is_pinned()


def test_keys_and_held_tensors_are_accepted_by_every_kind(device: Device) -> None:
    made: list[torch.Tensor] = []
    device.launch(
        "compute", lambda: made.append(torch.ones(4, device=device.torch_device)), writes=["x"]
    )
    device.record("compute").wait()
    device.own("x", made[0])
    device.wait("down", device.record("compute"))
    tensor = made.pop()
    device.launch("down", tensor.sum, reads=["x"])
    device.hold("down", tensor)
    device.disown("x")
    del tensor
    device.record("down").wait()


def test_streams_are_used_from_several_threads(device: Device) -> None:
    def use(stream: str) -> None:
        for _ in range(50):
            device.launch(stream, lambda: ran[stream].append(math.pi))
        device.record(stream).wait()

    ran: dict[str, list[float]] = {f"s{i}": [] for i in range(6)}
    threads = [threading.Thread(target=use, args=(stream,)) for stream in ran]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(values) for values in ran.values()] == [50] * 6
