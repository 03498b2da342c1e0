"""The CUDA device where there is no card; with one, see the contract."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from roundpipe.device import cuda
from roundpipe.device.cuda import CudaDevice, CudaState, cause_of_none, cuda_state
from roundpipe.errors import DeviceError

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a card")


@no_card
def test_a_device_without_a_card_says_why() -> None:
    with pytest.raises(DeviceError, match=r"cannot use cuda:0: .+\nhint: devices=cpu"):
        CudaDevice()
    with pytest.raises(DeviceError, match="cannot use second: "):
        CudaDevice("cuda:1", "second")


@no_card
def test_the_state_of_a_torch_without_cards_has_an_error() -> None:
    state = cuda_state()
    assert state.cards == ()
    assert state.error


def test_only_cuda_devices_are_accepted() -> None:
    with pytest.raises(DeviceError, match="not a CUDA device: cpu"):
        CudaDevice("cpu")


def test_a_cpu_build_is_named_before_what_torch_says() -> None:
    state = CudaState("2.13.0+cpu", None, None, (), "Torch not compiled with CUDA enabled")
    assert cause_of_none(state) == "this torch is a build for the CPU alone (2.13.0+cpu)"
    assert cause_of_none(CudaState("2.13.0", "13.0", None, (), "too old")) == "too old"
    assert cause_of_none(CudaState("2.13.0", "13.0", None, ())) == "torch sees none"


class Properties:
    def __init__(self, bus: int) -> None:
        self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, bus, 0


def test_cards_are_counted_by_their_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    buses = [0x81, 0x01, 0x41]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(buses[index]))
    assert cuda_state().cards == (1, 2, 0)
    assert cuda_state(keep_torch_order=True).cards == (0, 1, 2)


def test_a_card_that_is_not_there_and_one_that_cannot_compute_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        cuda, "cuda_state", lambda *, keep_torch_order: CudaState("2.13.0", "13.0", None, (0,))
    )
    with pytest.raises(DeviceError, match="cannot use cuda:3: torch sees 1 card, counted from 0"):
        CudaDevice(3)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch, "zeros", broken)
    with pytest.raises(DeviceError, match="cannot use cuda:0: no kernel image is available"):
        CudaDevice(0)


class Runtime:
    """CUDA's runtime, as far as page-locking goes: refuses every second registration."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address, num_bytes, flags))
        return 0 if len(self.calls) % 2 else 2

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address))
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]


def test_memory_is_page_locked_by_registration_and_a_refusal_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, blamed = Runtime(), []

    def zeros(*_: object, **where: object) -> None:
        blamed.append(where["device"])
        raise RuntimeError("CUDA error: out of memory")  # of the call before it

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch, "zeros", zeros)
    card = object.__new__(CudaDevice)
    card._torch_device, card._left_behind = torch.device("cuda:1"), False
    card.register(4096, 8192)
    with pytest.raises(DeviceError, match=r"^out of memory$"):
        card.register(65536, 4096)
    card.unregister(4096)
    portable = 1
    assert runtime.calls == [
        ("register", 4096, 8192, portable),
        ("register", 65536, 4096, portable),
        ("unregister", 4096),
    ]
    assert blamed == [torch.device("cuda:1")]
    card._left_behind = True  # a copy that nobody waits for may still use it
    card.unregister(0)
    assert len(runtime.calls) == 3
