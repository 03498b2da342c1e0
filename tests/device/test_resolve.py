"""What users write for ``devices``, on machines with and without cards that torch can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device import resolve
from roundpipe.device.cards import Card
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CudaState
from roundpipe.device.emulated import EmulatedDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.device.resolve import Surroundings, resolve_devices
from roundpipe.errors import ConfigError, DeviceError
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from collections.abc import Callable

NVIDIA = Card("NVIDIA", "/dev/nvidia0", has_driver=True)
NVIDIA_ON_BUS = Card("NVIDIA", "/sys/bus/pci/devices/0000:01:00.0", has_driver=False)
AMD = Card("AMD", "/dev/kfd", has_driver=True)

CPU_BUILD = CudaState("2.13.0+cpu", None, None, (), "Torch not compiled with CUDA enabled")
CUDA_BUILD = CudaState("2.13.0+cu130", "13.0", None, (0, 1, 2))
ROCM_BUILD = CudaState("2.13.0+rocm7", None, "7.0", (0,))


def without_cards(build: CudaState, error: str) -> CudaState:
    return CudaState(build.torch_version, build.cuda_version, build.hip_version, (), error)


NO_DRIVER = without_cards(CUDA_BUILD, "Found no NVIDIA driver on your system.")
OLD_DRIVER = without_cards(CUDA_BUILD, "The NVIDIA driver on your system is too old (found 11040).")
NONE_SEEN = without_cards(CUDA_BUILD, "No CUDA GPUs are available")


@dataclass(frozen=True)
class StandIn:
    """A card that is not there: what would have been made."""

    index: int
    name: str


def machine(state: CudaState, *cards: Card, **environment: str) -> Surroundings:
    return Surroundings(environment, lambda: cards, lambda *, keep_torch_order: state)


NO_CARD = machine(CPU_BUILD)
THREE_CARDS = machine(CUDA_BUILD, NVIDIA)


@pytest.fixture(autouse=True)
def _no_real_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "CudaDevice", StandIn)


def names(spec: object, around: Surroundings) -> list[str]:
    return [device.name for device in resolve_devices(spec, surroundings=around)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("auto", ["cpu"]),
        ("cpu", ["cpu"]),
        ("cpu*3", ["cpu:0", "cpu:1", "cpu:2"]),
        ("cpu * 2", ["cpu:0", "cpu:1"]),
        ("cpu:0", ["cpu:0"]),
        ("cpu,cpu", ["cpu:0", "cpu:1"]),
        ("[cpu, cpu]", ["cpu:0", "cpu:1"]),
        (["cpu", "cpu"], ["cpu:0", "cpu:1"]),
        (["cpu*2", "cpu"], ["cpu:0", "cpu:1", "cpu:2"]),
        (2, ["cpu:0", "cpu:1"]),
        ("2", ["cpu:0", "cpu:1"]),
        (1, ["cpu"]),
        (torch.device("cpu"), ["cpu"]),
        ([torch.device("cpu"), torch.device("cpu")], ["cpu:0", "cpu:1"]),
    ],
)
def test_a_machine_without_a_card(spec: object, expected: list[str]) -> None:
    assert names(spec, NO_CARD) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("auto", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        (2, ["cuda:0", "cuda:1"]),
        ("cuda*2", ["cuda:0", "cuda:1"]),
        ("cuda:2", ["cuda:2"]),
        ("cuda:0,cuda:2", ["cuda:0", "cuda:2"]),
        (["cuda:0", "cuda:2"], ["cuda:0", "cuda:2"]),
        ([0, 2], ["cuda:0", "cuda:2"]),
        ("0,2", ["cuda:0", "cuda:2"]),
        (["cuda:0", "cuda:0"], ["cuda:0/0", "cuda:0/1"]),
        ("cuda:1*2", ["cuda:1/0", "cuda:1/1"]),
        (torch.device("cuda", 1), ["cuda:1"]),
        (torch.device("cuda"), ["cuda:0"]),
        ("cpu", ["cpu"]),
        ("cpu*2", ["cpu:0", "cpu:1"]),
        (["cuda:0", "cpu"], ["cuda:0", "cpu"]),
    ],
)
def test_a_machine_with_three_cards(spec: object, expected: list[str]) -> None:
    assert names(spec, THREE_CARDS) == expected


@pytest.mark.parametrize("spec", ["auto", 1, "cuda", "cuda:0", [0]])
@pytest.mark.parametrize(
    ("around", "cause"),
    [
        (
            machine(CPU_BUILD, NVIDIA),
            r"NVIDIA \(/dev/nvidia0\): this torch is a build for the CPU alone \(2\.13\.0\+cpu\); "
            "install torch's build for CUDA",
        ),
        (machine(CPU_BUILD, AMD), "build for the CPU alone .*; install torch's build for ROCm"),
        (machine(NONE_SEEN, AMD), r"AMD \(/dev/kfd\): this torch is a build for NVIDIA"),
        (
            machine(without_cards(ROCM_BUILD, "No HIP GPUs are available"), NVIDIA),
            r"NVIDIA \(/dev/nvidia0\): this torch is a build for AMD",
        ),
        (machine(OLD_DRIVER, NVIDIA), "the nvidia driver on your system is too old"),
        (machine(NO_DRIVER, NVIDIA_ON_BUS), "no driver is loaded for it, or none was passed into"),
        (machine(NONE_SEEN, NVIDIA, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES='' hides"),
        (machine(NONE_SEEN, NVIDIA, CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES='-1' hides"),
        (machine(NONE_SEEN, NVIDIA, CUDA_VISIBLE_DEVICES="7"), "no cuda gpus are available"),
        (
            machine(without_cards(ROCM_BUILD, "none"), AMD, HIP_VISIBLE_DEVICES=""),
            "HIP_VISIBLE_DEVICES='' hides every card",
        ),
    ],
)
def test_a_card_that_torch_cannot_use_is_an_error_that_names_the_cause(
    spec: object, around: Surroundings, cause: str
) -> None:
    with pytest.raises(DeviceError, match=r"(?i)there is a card that torch cannot use: .*" + cause):
        resolve_devices(spec, surroundings=around)


def test_the_cpu_beside_an_unusable_card_can_be_asked_for() -> None:
    assert names("cpu", machine(CPU_BUILD, NVIDIA)) == ["cpu"]
    with pytest.raises(DeviceError, match=r"\nhint: devices=cpu trains on the CPU all the same$"):
        resolve_devices("auto", surroundings=machine(CPU_BUILD, NVIDIA))


def test_a_second_card_of_another_vendor_does_not_stop_the_first() -> None:
    assert names("auto", machine(ROCM_BUILD, NVIDIA, AMD)) == ["cuda:0"]


def test_cards_are_made_by_torchs_index_and_named_by_the_systems() -> None:
    turned = CudaState("2.13.0+cu130", "13.0", None, (2, 0, 1))
    around = machine(turned, NVIDIA)
    made = resolve_devices(["cuda:0", torch.device("cuda", 0)], surroundings=around)
    assert [(device.name, device.index) for device in made] == [
        ("cuda:0/0", 2),
        ("cuda:0/1", 0),
    ]


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        (None, True),
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, True),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        ({"PATH": "/bin"}, False),
    ],
)
def test_an_order_the_environment_chose_is_kept(
    environment: dict[str, str] | None, keeps: bool
) -> None:
    asked: list[bool] = []

    def state(*, keep_torch_order: bool) -> CudaState:
        asked.append(keep_torch_order)
        return CUDA_BUILD

    resolve_devices("cuda:0", surroundings=Surroundings(environment, lambda: [NVIDIA], state))
    assert set(asked) == {keeps}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpu", "not a device: 'gpu'"),
        ("mps", "not a device: 'mps'"),
        (torch.device("meta"), "not a device: device"),
        ("", "not a device: ''"),
        (["auto"], "not a device: 'auto'"),
        (True, "not a device: True"),
        (None, "not a device: None"),
        (1.5, r"not a device: 1\.5"),
        ("cpu*", "not a device"),
        ("cpu*0", r"devices names no device: cpu\*0"),
        ([], "devices names no device"),
        (0, "devices must be at least 1: 0"),
        (-1, "devices must be at least 1: -1"),
        (4, r"more devices asked for than cards that torch can use: 4 of 3"),
        ("cuda*4", "4 of 3"),
        ("cuda:3", "no such card: cuda:3\nhint: torch can use cuda:0, cuda:1, cuda:2"),
    ],
)
def test_what_is_no_device_is_refused(spec: object, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        resolve_devices(spec, surroundings=THREE_CARDS)


def test_an_emulated_machine_is_written_as_machines_are() -> None:
    devices = resolve_devices("emulated:2x4090+1x3060,96GB, time_scale=0.25, pcie3")
    assert [device.name for device in devices] == ["emulated:0", "emulated:1", "emulated:2"]
    assert all(isinstance(device, EmulatedDevice) for device in devices)
    clocks = {device.clock for device in devices if isinstance(device, EmulatedDevice)}
    (clock,) = clocks
    assert clock.machine == parse_machine("2x4090+1x3060,96GB,pcie3")
    assert clock.time_scale == 0.25
    for device in devices:
        device.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("emulated:", "a machine without a card"),
        ("emulated:2xnothing", "unknown card: nothing"),
        ("emulated:2x4090,time_scale=fast", "not a number: time_scale=fast\nhint: time_scale=0.1"),
        ("emulated:2x4090,time_scale=-1", "not a number: time_scale=-1"),
        (["emulated:2x4090"], "not a device: 'emulated:2x4090'"),
    ],
)
def test_an_emulated_machine_that_is_none_is_refused(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_devices(spec, surroundings=THREE_CARDS)


def test_a_card_asked_for_on_a_machine_without_one() -> None:
    with pytest.raises(DeviceError, match="this machine has no card that torch could use"):
        resolve_devices("cuda:0", surroundings=NO_CARD)


def test_ready_devices_pass_through() -> None:
    fake, cpu = FakeDevice("a"), CpuDevice("b", threads=1)
    assert resolve_devices([fake, cpu], surroundings=NO_CARD) == [fake, cpu]
    assert resolve_devices(fake, surroundings=NO_CARD) == [fake]


@pytest.mark.parametrize(("callers", "count", "each"), [(8, 2, 4), (8, 3, 2), (2, 3, 1), (1, 1, 1)])
def test_cpu_devices_share_the_threads_evenly(
    monkeypatch: pytest.MonkeyPatch, callers: int, count: int, each: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: callers)
    devices = resolve_devices(f"cpu*{count}", surroundings=NO_CARD)
    assert [device.threads for device in devices] == [each] * count


def test_threads_may_be_given() -> None:
    devices = resolve_devices("cpu*2", threads=3, surroundings=NO_CARD)
    assert [device.threads for device in devices] == [3, 3]


def test_nothing_starts_before_a_device_is_used(count_threads: Callable[[], int]) -> None:
    before = count_threads()
    resolve_devices("cpu*4", surroundings=NO_CARD)
    assert count_threads() == before


@pytest.fixture
def count_threads() -> Callable[[], int]:
    import threading

    return threading.active_count
