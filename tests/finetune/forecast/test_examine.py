"""Measuring: for real on CPU devices with little effort, and on cards that are invented."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CardFacts
from roundpipe.device.nvidia_smi import CardState, Process, Slowed
from roundpipe.device.probe import Effort, LinkRates, Probe
from roundpipe.device.survey import Place
from roundpipe.finetune.forecast.examine import Examination, Told
from roundpipe.finetune.forecast.examine_host import HostExamination, update_seconds
from roundpipe.plan.cards import card_named
from roundpipe.report.doctor import judge

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
LITTLE = Effort(seconds=0.005, copy_bytes=2**20, matrix_size=256, product_seconds=1e-4)
BUS = "0000:01:00.0"


@dataclass(frozen=True)
class StandIn:
    """A card that is not there."""

    index: int
    name: str

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)


@dataclass
class Invented:
    """A probe that knows its figures."""

    device: StandIn
    effort: Effort
    arithmetics = ("bf16", "fp16_fp16", "fp32")

    def matrix_rate(self, key: str) -> float | None:
        return {"bf16": 150e12, "fp32": 60e12}.get(key)

    def bandwidth(self) -> float:
        return 900.123456e9

    def link(self, *, pinned: bool) -> LinkRates:
        rate = (25e9 if pinned else 8e9) - self.device.index * 1e9
        return LinkRates(rate, rate, rate / 2, rate / 2)

    def busy_while(self, question):
        return question()

    def round_trip_is_intact(self) -> bool:
        return self.device.index == 0


def facts(device: torch.device) -> CardFacts:
    bus = BUS if device.index == 0 else ""
    return CardFacts("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, bus, 128)


@pytest.fixture
def how(tmp_path: Path) -> Examination:
    folder = tmp_path / "sys/bus/pci/devices" / BUS
    folder.mkdir(parents=True)
    for name, text in {
        "current_link_width": "4",
        "max_link_width": "16",
        "max_link_speed": "16.0 GT/s PCIe",
        "numa_node": "0",
    }.items():
        (folder / name).write_text(text)
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "meminfo").write_text("Node 0 MemTotal: 1000 kB\n")
    (node / "cpulist").write_text("0-3")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 88888888 kB\n")
    return Examination(
        place=Place(root=tmp_path, folder=tmp_path, card_facts=facts),
        probe=Invented,
        all_links=lambda probes: 30e9,
        host=HostExamination(
            root=tmp_path, effort=LITTLE, parameters=2**12, cores=lambda: frozenset({9})
        ),
    )


TOLD = Told(
    states={BUS: CardState(300.0, 450.0, is_kept_ready=False, lost_words=2)},
    processes={BUS: [Process(os.getpid(), "us", 1), Process(4242, "other", 2 * GIB)]},
    slowed=lambda: {BUS: Slowed(("its heat",), 84.0)},
)


def test_cards_are_described_from_all_sources(how: Examination) -> None:
    readings, machine = how.of([StandIn(0, "cuda:0"), StandIn(1, "cuda:1")], TOLD)
    first, second = readings.devices
    assert first.card == "RTX 4090"
    assert first.flops == {"bf16": 150e12, "fp32": 60e12}  # what it cannot do is left out
    assert first.bandwidth == 900.1e9
    assert first.usual_flops == card_named("4090").at_work().flops
    assert (first.lanes.used, first.lanes.of_card, first.lanes.generation) == (4, 16, 4)
    assert (first.power_limit, first.power_default) == (300, 450)
    assert (first.is_kept_ready, first.lost_words) == (False, 2)
    assert (first.slowed_by, first.degrees) == (("its heat",), 84.0)
    assert (second.is_kept_ready, second.slowed_by, second.degrees) == (None, (), None)
    assert [each.pid for each in first.processes] == [4242]  # not ourselves
    assert first.pageable is not None
    assert first.pageable.up == 8e9
    assert not second.is_intact
    assert second.lanes.used is None
    assert readings.unknown == ("the lanes of cuda:1 are not shown by this system",)
    assert not readings.host.nodes[0].is_ours  # we run on core 9
    assert machine.links[1].up == 24e9
    assert machine.links[0].duplex == 0.5
    assert machine.link_cap == 30e9  # of 49 one by one
    assert machine.text == "2 × RTX 4090"
    assert machine.cards[0].memory_bytes == 23 * GIB
    words = " ".join(finding.text for finding in judge(readings, machine))
    for word in ("comes back changed", "4 of 16 lanes", "300 of 450 W", "other (4242, "):
        assert word in words


def test_links_that_share_nothing_have_no_cap(how: Examination) -> None:
    from dataclasses import replace

    free = replace(how, all_links=lambda probes: 49e9)
    _, machine = free.of([StandIn(0, "cuda:0"), StandIn(1, "cuda:1")], TOLD)
    assert machine.link_cap is None


def test_a_missing_tool_is_one_sentence(how: Examination) -> None:
    readings, _ = how.of([StandIn(0, "cuda:0")], Told())
    assert [text for text in readings.unknown if "nvidia-smi does not answer" in text]
    assert readings.devices[0].processes == ()
    assert readings.all_links is None  # of one card


def test_workers_on_one_card_are_measured_once(how: Examination) -> None:
    readings, machine = how.of([StandIn(0, "cuda:0/0"), StandIn(0, "cuda:0/1")], TOLD)
    assert len(readings.devices) == machine.num_devices == 1


def test_cpu_devices_are_measured_for_real_and_once() -> None:
    devices = [CpuDevice(f"cpu:{index}", threads=1) for index in range(2)]
    said: list[str] = []
    how = Examination(
        probe=lambda device, _: Probe(device, LITTLE),
        host=HostExamination(effort=LITTLE, parameters=2**14),
        say=said.append,
    )
    readings, machine = how.of(devices, Told())
    assert said == ["measuring cpu:0", "measuring the host"]
    assert [device.name for device in readings.devices] == ["cpu:0", "cpu:1"]
    assert all(device.is_intact and device.is_cpu for device in readings.devices)
    assert readings.unknown == ()  # no tool is missed where there is no card
    assert machine.text == "2 × cpu"
    assert machine.link_cap is None
    assert machine.host.update_bandwidth == pytest.approx(
        28 / readings.host.update_seconds, rel=1e-3
    )
    for device in devices:
        device.close()


def test_the_optimizer_that_is_measured_is_the_one_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from roundpipe.finetune.forecast import examine_host

    seen = []
    real = examine_host.adamw_

    def watched(master, grad, *rest, out, implementation):
        assert implementation == "auto"
        seen.append((master.dtype, grad.dtype, out.dtype, master.numel()))
        real(master, grad, *rest, out=out)

    monkeypatch.setattr(examine_host, "adamw_", watched)
    device = CpuDevice(threads=1)
    assert update_seconds(Probe(device, LITTLE), 4096) > 0
    assert set(seen) == {(torch.float32, torch.bfloat16, torch.bfloat16, 4096)}
    device.close()
