"""What is the fake device's own: races, watched memory, failure on demand."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice, Ledger
from roundpipe.errors import RaceError

if TYPE_CHECKING:
    from collections.abc import Callable


def nothing() -> None:
    """Touch nothing."""


def test_a_wait_orders_a_read_after_the_write() -> None:
    device = FakeDevice("gpu")
    device.launch("weights", nothing, writes=["w3"])
    device.wait("compute", device.record("weights"))
    device.launch("compute", nothing, reads=["w3"])


def test_a_missing_wait_names_both_works_and_the_buffer() -> None:
    device = FakeDevice("gpu")
    device.launch("weights", nothing, writes=["w3"], label="U3")
    with pytest.raises(RaceError) as caught:
        device.launch("compute", nothing, reads=["w3"], label="F3.0")
    assert str(caught.value) == (
        "gpu.compute F3.0 reads 'w3' without waiting for gpu.weights U3, which writes it\n"
        "hint: record an event on gpu.weights after that work and let gpu.compute wait for it"
    )


def test_an_event_recorded_too_early_orders_nothing() -> None:
    device = FakeDevice()
    early = device.record("weights")
    device.launch("weights", nothing, writes=["w3"])
    device.wait("compute", early)
    with pytest.raises(RaceError, match="without waiting for fake"):
        device.launch("compute", nothing, reads=["w3"])


def test_reuse_of_a_buffer_waits_for_every_reader() -> None:
    device = FakeDevice()
    device.launch("weights", nothing, writes=["slot"])
    uploaded = device.record("weights")
    for stream in ("compute", "down"):
        device.wait(stream, uploaded)
        device.launch(stream, nothing, reads=["slot"])
    device.wait("weights", device.record("compute"))
    with pytest.raises(RaceError, match=r"without waiting for fake\.down, which reads it"):
        device.launch("weights", nothing, writes=["slot"])


def test_waits_carry_over() -> None:
    device = FakeDevice()
    device.launch("a", nothing, writes=["x"])
    device.wait("b", device.record("a"))
    device.launch("b", nothing, writes=["y"])
    device.wait("c", device.record("b"))
    device.launch("c", nothing, reads=["x", "y"])


def test_two_reads_need_no_order() -> None:
    device = FakeDevice()
    device.launch("a", nothing, reads=["x"])
    device.launch("b", nothing, reads=["x"])


def test_devices_and_the_host_share_a_ledger() -> None:
    ledger = Ledger()
    one, two = FakeDevice("0", ledger=ledger), FakeDevice("1", ledger=ledger)
    host = FakeDevice("host", ledger=ledger)
    one.launch("gradients", nothing, writes=["g0"], label="O0")
    two.wait("compute", one.record("gradients"))
    two.launch("compute", nothing, reads=["g0"])
    with pytest.raises(RaceError, match=r"host\.optimizer S0 writes 'g0' without waiting for 0"):
        host.launch("optimizer", nothing, writes=["g0"], label="S0")


def test_streams_of_one_name_on_two_devices_are_two_streams() -> None:
    ledger = Ledger()
    one, two = FakeDevice("0", ledger=ledger), FakeDevice("1", ledger=ledger)
    one.launch("compute", nothing, writes=["x"])
    with pytest.raises(RaceError):
        two.launch("compute", nothing, reads=["x"])


def test_blocking_the_host_orders_nothing() -> None:
    ledger = Ledger()
    device, host = FakeDevice("0", ledger=ledger), FakeDevice("host", ledger=ledger)
    device.launch("gradients", nothing, writes=["g"])
    event = device.record("gradients")
    event.wait()
    with pytest.raises(RaceError):
        host.launch("optimizer", nothing, reads=["g"])


def test_an_event_of_another_kind_is_waited_for() -> None:
    cpu, fake = CpuDevice(threads=1), FakeDevice()
    gate = threading.Event()
    cpu.launch("compute", gate.wait)
    event = cpu.record("compute")
    waiter = threading.Thread(target=fake.wait, args=("compute", event))
    waiter.start()
    assert not event.is_complete()
    gate.set()
    waiter.join(5)
    assert event.is_complete()
    cpu.close()


def small_schedule(device: FakeDevice, *, dropped: int | None) -> None:
    """Two stages through one slot, gradients back; wait number ``dropped`` is left out."""
    waits = 0

    def wait(stream: str, event: object) -> None:
        nonlocal waits
        if waits != dropped:
            device.wait(stream, event)
        waits += 1

    for stage in range(2):
        if stage:
            wait("weights", device.record("compute"))
        device.launch("weights", nothing, writes=["slot"], label=f"U{stage}")
        wait("compute", device.record("weights"))
        if stage:
            wait("compute", device.record("gradients"))
        device.launch("compute", nothing, reads=["slot"], writes=["grad"], label=f"X{stage}")
        wait("gradients", device.record("compute"))
        device.launch("gradients", nothing, reads=["grad"], writes=["host"], label=f"O{stage}")
        if stage:
            wait("host", device.record("gradients"))
    device.launch("host", nothing, reads=["host"], label="S")


def test_a_small_schedule_has_no_race() -> None:
    small_schedule(FakeDevice(), dropped=None)


@pytest.mark.parametrize("dropped", range(7))
def test_each_missing_wait_of_a_small_schedule_is_seen(dropped: int) -> None:
    with pytest.raises(RaceError):
        small_schedule(FakeDevice(), dropped=dropped)


def test_a_race_goes_to_on_error_and_the_work_does_not_run() -> None:
    device = FakeDevice()
    told: list[BaseException] = []
    device.launch("a", nothing, writes=["x"])
    device.launch("b", lambda: pytest.fail("ran"), reads=["x"], on_error=told.append)
    assert [type(error) for error in told] == [RaceError]
    device.close()


def test_fail_is_asked_for_each_label_and_its_answer_is_what_the_work_raised() -> None:
    device = FakeDevice(fail=lambda label: OSError("copy broke") if label == "U1" else None)
    told: list[BaseException] = []
    ran: list[str] = []
    for label in ("U0", "U1", "U2"):
        device.launch(
            "weights", lambda label=label: ran.append(label), label=label, on_error=told.append
        )
    assert [str(error) for error in told] == ["copy broke"]
    assert ran == ["U0", "U2"]


def test_a_key_pressed_while_work_runs_is_not_swallowed() -> None:
    def press() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FakeDevice().launch("compute", press)


def test_describe_names_the_work_under_way() -> None:
    device = FakeDevice()
    seen: list[dict[str, str]] = []
    device.launch("compute", lambda: seen.append(device.describe()), label="F3.1")
    assert seen == [{"compute": "F3.1"}]
    assert device.describe() == {"compute": "idle"}


def test_two_keys_of_one_memory_are_one_buffer() -> None:
    device = FakeDevice()
    arena = device.allocate(1024)
    device.own("visit 3", arena[:512])
    device.own("visit 5", arena[256:768])
    device.launch("compute", nothing, reads=["visit 3"], label="F3.0")
    with pytest.raises(RaceError, match=r"F3\.0, which reads the same memory as 'visit 3'"):
        device.launch("weights", nothing, writes=["visit 5"], label="U5")


def test_keys_side_by_side_in_one_arena_do_not_touch() -> None:
    device = FakeDevice()
    arena = device.allocate(1024)
    device.own("left", arena[:512])
    device.own("right", arena[512:])
    device.launch("a", nothing, writes=["left"])
    device.launch("b", nothing, writes=["right"])


def test_a_disowned_buffer_must_not_be_touched_until_it_is_owned_again() -> None:
    device = FakeDevice()
    device.own("w3", torch.zeros(4))
    device.disown("w3")
    with pytest.raises(RaceError, match="reads 'w3', which was disowned"):
        device.launch("compute", nothing, reads=["w3"], label="F3.0")
    device.own("w3", torch.zeros(4))
    device.launch("compute", nothing, reads=["w3"])


def test_whoever_gets_the_memory_of_a_disowned_buffer_comes_after_its_users() -> None:
    device = FakeDevice()
    arena = device.allocate(512)
    device.own("w3", arena)
    device.launch("compute", nothing, reads=["w3"], label="F3.0")
    used = device.record("compute")
    device.disown("w3")
    device.own("w5", arena)
    with pytest.raises(RaceError, match=r"reads the same memory as 'w3' \(disowned\)"):
        device.launch("weights", nothing, writes=["w5"], label="U5")
    device.wait("again", used)
    device.own("w7", arena[:256])
    device.launch("again", nothing, writes=["w7"])


def test_a_key_starts_anew_on_new_memory() -> None:
    device = FakeDevice()
    first = torch.zeros(4)
    device.own("x", first)
    device.launch("a", nothing, writes=["x"])
    device.disown("x")
    device.own("x", torch.zeros(4))
    device.launch("b", nothing, writes=["x"])


def watched() -> tuple[FakeDevice, torch.Tensor, torch.Tensor]:
    device = FakeDevice(watch_storage=True)
    arena = device.allocate(512).view(torch.float32)
    arena.fill_(1.0)
    weight, other = arena[:16].view(4, 4), arena[64:80].view(4, 4)
    device.own("w", weight)
    device.own("o", other)
    return device, weight, other


def test_a_read_that_was_not_declared_is_seen() -> None:
    device, weight, _ = watched()
    with pytest.raises(RaceError) as caught:
        device.launch("compute", lambda: torch.ones(2, 4) @ weight, reads=["o"], label="F0")
    assert str(caught.value) == (
        "fake.compute F0 reads 'w' by aten.mm.default without saying so\n"
        "hint: name it among what the work reads"
    )


def test_a_write_to_what_was_declared_as_read_is_seen() -> None:
    device, weight, _ = watched()
    with pytest.raises(RaceError, match=r"writes 'w' by aten\.exp_\.default without saying so"):
        device.launch("compute", weight.exp_, reads=["w"])


def touch(kind: str, weight: torch.Tensor) -> Callable[[], object]:
    return {
        "out=": lambda: torch.mm(torch.ones(4, 4), torch.ones(4, 4), out=weight),
        "copy to": partial(weight.copy_, torch.ones(4, 4)),
        "foreach": lambda: torch._foreach_add_([weight], 1.0),
        "through a view": weight.t()[1:].detach().unsqueeze(0)[..., ::2].zero_,
        "fused adam": lambda: torch._fused_adamw_(
            *([weight], [torch.ones(4, 4)], [torch.zeros(4, 4)], [torch.zeros(4, 4)]),
            *([], [torch.ones(())]),
            lr=1e-3,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
        "running mean": lambda: torch.nn.functional.batch_norm(
            torch.ones(2, 4), weight[0], torch.ones(4), training=True
        ),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["out=", "copy to", "foreach", "through a view", "fused adam", "running mean"]
)
def test_writes_are_seen_by_whatever_way(kind: str) -> None:
    device, weight, _ = watched()
    with pytest.raises(RaceError, match="writes 'w'"):
        device.launch("compute", touch(kind, weight), reads=["w"])
    device.launch("compute", touch(kind, weight), writes=["w"])
    device.close()


def test_views_and_shapes_touch_nothing() -> None:
    device, weight, _ = watched()
    device.launch("compute", lambda: torch.zeros_like(weight.view(-1)[::2].view(2, 4).t()).add_(1))
    device.close()


def test_memory_that_nobody_owns_is_private() -> None:
    device, _, _ = watched()
    scratch = torch.ones(8)
    device.launch("compute", lambda: scratch.add_(1))


def test_memory_that_was_let_go_and_given_out_again_is_private() -> None:
    device = FakeDevice(watch_storage=True)
    for _ in range(50):
        tensor = torch.ones(1000)
        device.own("x", tensor)
        del tensor
        device.launch("compute", lambda: torch.ones(1000).add_(1))


def test_declared_parts_may_cover_an_owned_whole() -> None:
    device = FakeDevice(watch_storage=True)
    slot = device.allocate(1024)
    device.own("slot", slot)
    device.own("slot#0", slot[:512])
    device.own("slot#1", slot[512:])
    device.launch("weights", slot[:512].zero_, writes=["slot#0"], label="U#0")
    with pytest.raises(RaceError, match="writes 'slot' by"):
        device.launch("weights", slot.zero_, writes=["slot#0"])
    device.launch("weights", slot.zero_, writes=["slot#0", "slot#1"])
    with pytest.raises(RaceError, match="reads 'slot' without waiting for fake"):
        device.launch("compute", slot.sum, reads=["slot"])


def test_backward_is_watched_too() -> None:
    device, weight, _ = watched()
    leaf = weight.detach().requires_grad_()
    x = torch.ones(2, 4, requires_grad=True)
    outputs: list[torch.Tensor] = []
    device.launch("compute", lambda: outputs.append((x @ leaf).sum()), reads=["w"], label="F0")
    with pytest.raises(RaceError, match=r"B0 reads 'w' by aten\.mm\.default"):
        device.launch("compute", outputs[0].backward, label="B0")


def test_backward_that_adds_to_an_owned_gradient_declares_it() -> None:
    device, weight, gradient = watched()
    leaf = weight.detach().requires_grad_()
    leaf.grad = gradient

    def run() -> None:
        (torch.ones(2, 4) @ leaf).sum().backward()

    with pytest.raises(RaceError, match="writes 'o'"):
        device.launch("compute", run, reads=["w"], label="B0")
    device.launch("compute", run, reads=["w"], writes=["o"], label="B0")
