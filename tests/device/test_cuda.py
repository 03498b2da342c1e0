"""The CUDA device where there is no card; with one, see the contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from roundpipe.device import cuda
from roundpipe.device.cuda import CudaDevice, CudaState, CudaTiming, cause_of_none, cuda_state
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


class Event:
    """A card's event, passed at ``milliseconds``; None: not yet."""

    def __init__(self, milliseconds: float | None) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds is not None

    def elapsed_time(self, later: Event) -> float:
        if self.milliseconds is None or later.milliseconds is None:
            raise ValueError("both events must be completed")  # as torch does
        return later.milliseconds - self.milliseconds


def test_the_times_of_work_under_way_are_not_a_number() -> None:
    origin: Any = cuda._Origin(Event(0.0), 10.0)  # type: ignore[arg-type]
    start, end = Event(2000.0), Event(None)
    timing = CudaTiming(origin, start, end)  # type: ignore[arg-type]
    assert math.isnan(timing.start_seconds)
    assert math.isnan(timing.end_seconds)
    end.milliseconds = 2500.0
    assert timing.start_seconds == pytest.approx(12.0)
    assert timing.end_seconds == pytest.approx(12.5)
