"""This machine as a Machine, on machines that are invented."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CardFacts
from roundpipe.device.survey import Place, free_disk, survey, survey_devices, with_measured
from roundpipe.plan.cards import card_named
from roundpipe.plan.hosts import pcie_rate
from roundpipe.plan.machine import Link
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class StandIn:
    """A card that is not there; a survey asks only where it is."""

    index: int
    name: str = "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)


def facts(name: str = "NVIDIA GeForce RTX 4090", *, total: int = 24, free: int = 23, bus: str = ""):
    return CardFacts(name, total * GIB, free * GIB, bus, 128)


def place(root: Path, **cards: CardFacts) -> Place:
    """``cards`` by index: ``c0``, ``c1``."""
    meminfo = root / "proc/meminfo"
    meminfo.parent.mkdir(parents=True, exist_ok=True)
    meminfo.write_text("MemTotal: 134217728 kB\nMemAvailable: 104857600 kB\n")
    return Place(root=root, folder=root, card_facts=lambda device: cards[f"c{device.index}"])


def test_a_known_card_has_the_rates_of_the_table_and_the_memory_that_is_free(
    tmp_path: Path,
) -> None:
    machine = survey_devices([StandIn(0)], place=place(tmp_path, c0=facts(free=22)))
    [card] = machine.cards
    known = card_named("4090").at_work()
    assert card == replace(known, memory_bytes=22 * GIB)
    assert machine.links[0] == parse_machine("1x4090,64GB").links[0]
    assert machine.host.memory_bytes == 100 * GIB
    assert machine.host.disk_bytes
    assert machine.link_cap
    assert any("by data sheet" in note for note in machine.notes)


def test_memory_that_others_hold_is_noted(tmp_path: Path) -> None:
    machine = survey_devices([StandIn(0, "cuda:3")], place=place(tmp_path, c0=facts(free=10)))
    assert any(note.startswith("cuda:3: ") and "by others" in note for note in machine.notes)
    quiet = survey_devices([StandIn(0)], place=place(tmp_path, c0=facts(free=23)))
    assert not any("by others" in note for note in quiet.notes)


def test_an_unknown_card_is_guessed_and_noted(tmp_path: Path) -> None:
    here = place(tmp_path, c0=facts("NVIDIA Prototype"))
    machine = survey_devices([StandIn(0)], place=here)
    assert machine.cards[0].name == "NVIDIA Prototype"
    assert machine.cards[0].flops["bf16"] > 1e13
    assert any("Prototype is not in the table" in note for note in machine.notes)


def test_the_slot_that_the_kernel_shows_sets_the_link(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_width").write_text("4")
    (folder / "max_link_speed").write_text("8.0 GT/s PCIe")
    machine = survey_devices([StandIn(0)], place=place(tmp_path, c0=facts(bus="0000:01:00.0")))
    assert machine.links[0].up == pcie_rate(3, 4)
    (folder / "max_link_speed").write_text("2.5 GT/s PCIe")  # no card that trains is so old
    machine = survey_devices([StandIn(0)], place=place(tmp_path, c0=facts(bus="0000:01:00.0")))
    assert machine.links[0].up == pcie_rate(4, 4)


def test_two_workers_on_a_card_share_it(tmp_path: Path) -> None:
    here = place(tmp_path, c0=facts(), c1=facts())
    alone = survey_devices([StandIn(0), StandIn(1)], place=here)
    machine = survey_devices([StandIn(0), StandIn(1), StandIn(0)], place=here)
    assert machine.cards[1] == alone.cards[1]
    for worker in (0, 2):
        assert machine.cards[worker].memory_bytes == alone.cards[0].memory_bytes // 2
        assert machine.cards[worker].flops["bf16"] == alone.cards[0].flops["bf16"] / 2
        assert machine.links[worker].up == alone.links[0].up / 2


def test_cpu_devices_share_threads_and_host_memory(tmp_path: Path) -> None:
    devices = [CpuDevice(f"cpu:{index}", threads=3) for index in range(2)]
    machine = survey_devices(devices, place=place(tmp_path))
    assert machine.cards[0] == machine.cards[1]
    assert sum(card.memory_bytes for card in machine.cards) <= machine.host.memory_bytes // 2
    assert machine.cards[0].flops["fp32"] == pytest.approx(
        parse_machine("1xcpu,64GB").cards[0].flops["fp32"] * 3 / 8
    )
    assert machine.link_cap is None
    for device in devices:
        device.close()


def test_a_limit_of_host_memory_is_noted(tmp_path: Path) -> None:
    here = place(tmp_path, c0=facts())
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(30 * GIB))
    (group / "memory.current").write_text(str(10 * GIB))
    machine = survey_devices([StandIn(0)], place=here)
    assert machine.host.memory_bytes == 20 * GIB
    assert any("memory limit of a group" in note for note in machine.notes)


def test_a_system_that_does_not_tell_its_memory_is_assumed_and_noted(tmp_path: Path) -> None:
    here = Place(root=tmp_path, folder=tmp_path, card_facts=lambda device: facts())
    machine = survey_devices([StandIn(0)], place=here)
    assert machine.host.memory_bytes == 64 * 10**9
    assert any("host memory is not known" in note for note in machine.notes)


# what was measured before


def measured(text: str):
    machine = parse_machine(text)
    return replace(
        machine,
        cards=tuple(replace(card, flops={"bf16": 7e13}, memory_bytes=1) for card in machine.cards),
        links=tuple(Link(up=index + 1e9, down=2e9) for index in range(machine.num_devices)),
        host=replace(machine.host, bandwidth=33e9, update_bandwidth=11e9, memory_bytes=1),
        link_cap=5e9,
    )


def test_measured_rates_are_used_with_the_memory_of_now() -> None:
    now = parse_machine("2x4090,64GB")
    machine, note = with_measured(now, measured("2x4090,64GB"))
    assert machine.cards[0].flops == {"bf16": 7e13}
    assert machine.cards[0].memory_bytes == now.cards[0].memory_bytes
    assert [link.up for link in machine.links] == [1e9, 1e9 + 1]
    assert (machine.host.bandwidth, machine.host.update_bandwidth) == (33e9, 11e9)
    assert machine.host.memory_bytes == 64 * 10**9
    assert machine.link_cap == 5e9
    assert "measured here" in note


def test_some_of_the_measured_cards_are_enough() -> None:
    machine, _ = with_measured(parse_machine("1x3060,64GB"), measured("1x4090+1x3060,64GB"))
    assert machine.links[0].up == 1e9 + 1


@pytest.mark.parametrize(
    ("now", "before"),
    [("2x4090,64GB", "1x4090,64GB"), ("1x3090,64GB", "1x4090,64GB"), ("1xcpu,9GB", "2xcpu,9GB")],
)
def test_what_was_measured_of_other_devices_is_not_used(now: str, before: str) -> None:
    machine = parse_machine(now)
    same, note = with_measured(machine, measured(before))
    assert same == machine
    assert "by data sheet" in note
    assert "doctor --save" in note


# this very machine


def test_this_machine_can_be_surveyed() -> None:
    machine = survey("cpu*2")
    assert machine.num_devices == 2
    assert machine.host.memory_bytes > 0
    assert machine.text == "this machine"


def test_free_disk_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    free = free_disk(tmp_path / "not" / "yet")
    assert free is not None
    assert free > 0
