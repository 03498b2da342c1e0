"""What is not said: limits of the rules on host, software and disks. What is: test_doctor_rigs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.machine_text import parse_machine
from roundpipe.report.doctor import judge
from roundpipe.report.readings import (
    CopyRates,
    DeviceReadings,
    DiskReadings,
    HostReadings,
    PackageReadings,
    Readings,
    SoftwareReadings,
)

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine

HOST = HostReadings(
    threads=6, bandwidth_one_thread=10e9, bandwidth=50e9, update_seconds=0.6e-9, cores=8
)
CARD = DeviceReadings(
    name="cuda:0",
    card="RTX 4090",
    is_cpu=False,
    flops={"bf16": 1e14},
    bandwidth=9e11,
    pinned=CopyRates(up=25e9, down=25e9, duplex=0.9),
    pageable=None,
    is_intact=True,
    total_bytes=24 * 10**9,
    free_bytes=23 * 10**9,
)
CPU = replace(CARD, name="cpu", card="cpu", is_cpu=True)


def said(
    device: DeviceReadings = CARD, *, cards: int = 1, machine: Machine | None = None, **more: Any
) -> str:
    """All texts about a machine in which ``more`` of the host, the disk or software is so."""
    software = SoftwareReadings(**more.pop("software", {}))
    disks = tuple(more.pop("disks", ()))
    devices = tuple(replace(device, name=f"cuda:{place}") for place in range(cards))
    readings = Readings(devices=devices, host=replace(HOST, **more), disks=disks, software=software)
    there = machine or parse_machine("1xcpu,64GB" if device.is_cpu else f"{cards}x4090,64GB")
    return "\n".join(finding.text for finding in judge(readings, there, lambda _: 1.0))


def test_an_optimizer_that_nearly_keeps_up_with_memory_is_not_slow() -> None:
    assert said() == ""
    assert "the optimizer takes 2 ns" in said(update_seconds=2e-9)
    assert "the optimizer takes" not in said(CPU, update_seconds=2e-9)  # one thread, by design


def test_cards_want_a_core_each_and_two_more() -> None:
    assert "cores for" not in said(cards=6)
    assert "8 cores for 7 cards" in said(cards=7)
    assert "8 cores for 7 cards" not in said(cards=7, machine_cores=64)  # the limit is said
    assert "may use 8 of 64 cores" in said(cards=7, machine_cores=64)


def test_memory_half_as_fast_as_that_of_its_like_is_said() -> None:
    assert said(usual_bandwidth=99e9) == ""
    assert "where hosts like it move 101 GB/s" in said(usual_bandwidth=101e9)


@pytest.mark.parametrize(("may", "is_said"), [(3.5e9, False), (3.0e9, True)])
def test_a_clock_a_tenth_below_is_said(may: float, is_said: bool) -> None:
    assert ("3.6 GHz" in said(clock=(may, 3.6e9, "a limit that was set"))) is is_said


def test_large_pages_are_missed_only_where_the_kernel_never_gives_them() -> None:
    for word in ("always", "madvise", ""):
        assert said(huge_pages=word, fresh=1e9) == ""
    assert "large pages" in said(huge_pages="never", fresh=1e9)


@pytest.mark.parametrize("value", ["1", "", "x"])
def test_a_launcher_of_one_process_is_none(value: str) -> None:
    assert said(software={"variables": {"WORLD_SIZE": value}}) == ""


def test_cards_are_hidden_only_by_a_variable() -> None:
    assert said(software={"num_cards": 8}) == ""  # devices= asked for fewer
    hidden = {"num_cards": 8, "variables": {"CUDA_VISIBLE_DEVICES": "3"}}
    assert said(software=hidden) == "CUDA_VISIBLE_DEVICES=3 leaves 1 of 8 cards"


def test_threads_are_few_only_for_devices_on_the_cpu() -> None:
    one = {"variables": {"OMP_NUM_THREADS": "1"}}
    assert said(threads=1, software=one) == ""
    assert "CPU devices compute on 1 of 8 cores" in said(CPU, threads=1, software=one)


def test_a_card_beside_the_cpu_that_was_asked_for_is_named() -> None:
    assert said(CPU) == "there is no card: training runs on the CPU"
    unused = {"unused_cards": "NVIDIA (/dev/nvidia0)"}
    assert said(CPU, software=unused).startswith("there is a card, NVIDIA (/dev/nvidia0), but")


def test_a_disk_is_judged_by_what_it_is_used_for() -> None:
    def disk(used_for: str, free: int) -> list[DiskReadings]:
        return [DiskReadings(used_for=used_for, folder="/x", free_bytes=free, write=1e8, read=1e8)]

    runs, cache = said(disks=disk("runs", 5 * 10**9)), said(disks=disk("the hub's cache", 10**13))
    assert "are free" not in runs
    assert "written at" in runs
    assert "read at" not in runs
    assert "read at" in cache
    assert "written at" not in cache
    assert "5 GB are free" in said(disks=disk("the hub's cache", 5 * 10**9))


def test_a_driver_that_answers_at_once_may_sleep() -> None:
    sleepy = replace(CARD, is_kept_ready=False)
    assert said(sleepy, software={"tool_seconds": 0.3}) == ""
    assert "goes to sleep" in said(sleepy, software={"tool_seconds": 2.0})


def test_libraries_that_are_new_enough_are_not_named() -> None:
    good = PackageReadings(name="peft", version="0.21", needs="0.18")
    assert said(software={"packages": (good,)}) == ""
