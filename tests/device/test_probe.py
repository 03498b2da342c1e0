"""Measurements through the Protocol, on CPU devices and with little effort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.probe import (
    CARD_EFFORT,
    Effort,
    LinkRates,
    Probe,
    effort_within,
    rate_of_all_links,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LITTLE = Effort(seconds=0.01, copy_bytes=2**20, matrix_size=256, product_seconds=1e-4)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(threads=1)
    yield made
    made.close()


def test_every_figure_of_a_device_is_a_rate(device: CpuDevice) -> None:
    probe = Probe(device, LITTLE)
    assert "fp32" in probe.arithmetics
    assert all((probe.matrix_rate(key) or 1) > 1e6 for key in probe.arithmetics)
    assert probe.bandwidth() > 1e6
    rates = probe.link(pinned=True)
    assert min(rates.up, rates.down, rates.up_both, rates.down_both) > 1e6
    assert 0 < rates.duplex <= 1


def test_duplex_is_what_is_left_when_both_ways_run() -> None:
    assert LinkRates(up=20, down=10, up_both=10, down_both=5).duplex == 0.5
    assert LinkRates(up=20, down=10, up_both=22, down_both=10).duplex == 1.0


def test_a_question_is_asked_while_the_device_computes() -> None:
    device = CpuDevice(threads=1)
    probe = Probe(device, Effort(0.01, 2**20, 256, 1e-4))

    def question() -> bool:
        return device.record("compute").is_complete()

    assert probe.busy_while(question, seconds=0.2) is False
    assert question() is True  # what it was given has been done when it returns
    device.close()


def test_products_grow_until_one_lasts_long_enough(device: CpuDevice) -> None:
    sizes = []
    mm = torch.mm

    def watched(left, right, *, out):
        sizes.append(len(left))
        return mm(left, right, out=out)

    torch.mm = watched
    try:
        Probe(device, Effort(0.01, 2**20, 1024, product_seconds=1e9)).matrix_rate("fp32")
        assert max(sizes) == 1024
        sizes.clear()
        Probe(device, Effort(0.01, 2**20, 1024, product_seconds=0.0)).matrix_rate("fp32")
        assert max(sizes) == 256
    finally:
        torch.mm = mm


def test_an_arithmetic_that_the_device_has_not_is_none(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("\"addmm_impl\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", missing)
    assert Probe(device, LITTLE).matrix_rate("fp16") is None


def test_a_failure_of_the_device_is_raised(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch, "mm", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        Probe(device, LITTLE).matrix_rate("fp32")


def test_what_does_not_fit_is_measured_smaller(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    mm = torch.mm

    def small(left, right, *, out):
        if len(left) > 256:
            raise torch.OutOfMemoryError("no room")
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", small)
    assert Probe(device, Effort(0.01, 2**20, 1024, 1e9)).matrix_rate("fp32")


class _Spoils(CpuDevice):
    """Lets one bit of every download fall over."""

    def launch(self, stream, work, **options):
        def spoiled() -> object:
            result = work()
            if stream == "gradients":
                result.view(-1)[result.numel() // 2] ^= 4
            return result

        return super().launch(stream, spoiled, **options)


def test_a_bit_that_falls_over_on_the_way_is_seen(device: CpuDevice) -> None:
    assert Probe(device, LITTLE).round_trip_is_intact()
    bad = _Spoils(threads=1)
    assert not Probe(bad, LITTLE).round_trip_is_intact()
    bad.close()


def test_a_download_waits_for_the_upload_it_checks() -> None:
    slow = CpuDevice(threads=1, max_delay_seconds=0.01, poison_released=True)
    assert Probe(slow, LITTLE).round_trip_is_intact(times=5)
    slow.close()


def test_little_room_is_enough() -> None:
    assert effort_within(CARD_EFFORT, 100 * 2**30) == CARD_EFFORT
    assert effort_within(CARD_EFFORT, 2**30).copy_bytes * 8 < 2**30


def test_all_links_at_once_are_one_rate(device: CpuDevice) -> None:
    other = CpuDevice(threads=1)
    probes = [Probe(each, LITTLE) for each in (device, other)]
    assert rate_of_all_links(probes) > 1e6
    other.close()


def test_the_switches_of_arithmetic_are_put_back() -> None:
    from roundpipe.device.probe import _switched, _switches

    matmul = torch.backends.cuda.matmul
    before = (matmul.fp32_precision, matmul.allow_fp16_accumulation)

    def fails_switched() -> None:
        with _switched(_switches("fp16_fp16")):
            assert matmul.allow_fp16_accumulation
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_switched()
    with _switched(_switches("tf32")):
        assert matmul.fp32_precision == "tf32"
        assert not matmul.allow_fp16_accumulation
    assert (matmul.fp32_precision, matmul.allow_fp16_accumulation) == before


@pytest.mark.gpu(n=1)
def test_a_card_is_measured_in_every_arithmetic() -> None:
    from roundpipe.device.cuda import CudaDevice, card_facts

    card = CudaDevice(0)
    effort = Effort(seconds=0.05, copy_bytes=2**24, matrix_size=1024, product_seconds=1e-3)
    probe = Probe(card, effort)
    assert all(probe.matrix_rate(key) for key in probe.arithmetics)
    assert probe.bandwidth() > 1e9
    assert probe.link(pinned=True).up > 1e8
    assert probe.link(pinned=False).down > 1e8
    assert probe.round_trip_is_intact()
    about = card_facts(card.torch_device)
    assert 0 < about.free_bytes <= about.total_bytes
    card.close()
