"""Slots and memory nodes, read from invented files of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.device.topology import Slot, is_virtual, memory_nodes, slot_of

if TYPE_CHECKING:
    from pathlib import Path

BUS = "0000:01:00.0"


def card(root: Path, *, port_speed: str = "32.0 GT/s PCIe", **files: str) -> None:
    """A card below a port of the board, as the kernel links them."""
    port = root / "sys/devices/pci0000:00/0000:00:01.0"
    place = port / BUS
    place.mkdir(parents=True)
    (port / "max_link_speed").write_text(port_speed + "\n")
    for name, text in files.items():
        (place / name).write_text(text + "\n")
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / BUS).symlink_to(place)


def test_lanes_are_those_in_use_and_those_of_the_card(tmp_path: Path) -> None:
    card(
        tmp_path,
        max_link_speed="16.0 GT/s PCIe",
        current_link_speed="2.5 GT/s PCIe",  # it sleeps
        current_link_width="4",
        max_link_width="16",
        numa_node="1",
    )
    assert slot_of(BUS, tmp_path) == Slot(
        lanes=4, card_lanes=16, generation=4, card_generation=4, node=1
    )


def test_an_older_slot_sets_the_generation(tmp_path: Path) -> None:
    card(tmp_path, port_speed="8.0 GT/s PCIe", max_link_speed="16.0 GT/s PCIe")
    slot = slot_of(BUS, tmp_path)
    assert (slot.generation, slot.card_generation) == (3, 4)


def test_the_slot_of_a_virtual_machine_is_not_believed(tmp_path: Path) -> None:
    card(tmp_path, port_speed="2.5 GT/s PCIe", max_link_speed="32.0 GT/s PCIe")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu vme hypervisor lahf_lm\n")
    assert is_virtual(tmp_path)
    assert slot_of(BUS, tmp_path).generation == 5


def test_what_the_kernel_does_not_show_is_not_known(tmp_path: Path) -> None:
    card(tmp_path, numa_node="-1", current_link_width="255", max_link_speed="Unknown")
    assert slot_of(BUS, tmp_path) == Slot(generation=5)
    assert slot_of("", tmp_path) == Slot()
    assert slot_of("0000:99:00.0", tmp_path) == Slot()


def test_memory_nodes_have_memory_and_cores(tmp_path: Path) -> None:
    for index, kib, cores in ((10, 64, "8-9"), (0, 128, "0-3,12"), (1, 0, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {index} MemTotal:   {kib} kB\nNode MemFree: 1 kB\n")
        (folder / "cpulist").write_text(cores + "\n")
    first, second = memory_nodes(tmp_path)  # one without memory is none
    assert (first.index, first.num_bytes, first.cores) == (0, 128 * 1024, {0, 1, 2, 3, 12})
    assert (second.index, second.cores) == (10, {8, 9})
    assert memory_nodes(tmp_path / "elsewhere") == ()
    assert not is_virtual(tmp_path)
