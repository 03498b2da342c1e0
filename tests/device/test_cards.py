from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roundpipe.device.cards import find_cards

if TYPE_CHECKING:
    from pathlib import Path


def plug_in(root: Path, slot: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


def touch(root: Path, path: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).touch()


def test_a_machine_without_anything_has_no_card(tmp_path: Path) -> None:
    assert find_cards(tmp_path) == []


def test_other_devices_are_no_cards(tmp_path: Path) -> None:
    plug_in(tmp_path, "0000:00:01.0", "0x1af4", "0x030000")  # the screen of a virtual machine
    plug_in(tmp_path, "0000:00:02.0", "0x1a03", "0x030000")  # that of a server's management board
    plug_in(tmp_path, "0000:00:03.0", "0x10de", "0x040300")  # sound over HDMI
    plug_in(tmp_path, "0000:00:04.0", "0x1002", "0x060400")  # a bridge
    touch(tmp_path, "dev/nvidiactl")
    assert find_cards(tmp_path) == []


@pytest.mark.parametrize(
    ("vendor", "kind", "name"),
    [
        ("0x10de", "0x030000", "NVIDIA"),
        ("0x10de", "0x030200", "NVIDIA"),
        ("0x1002", "0x030000", "AMD"),
        ("0x1002", "0x120000", "AMD"),
    ],
)
def test_cards_are_seen_on_the_bus_without_a_driver(
    tmp_path: Path, vendor: str, kind: str, name: str
) -> None:
    plug_in(tmp_path, "0000:01:00.0", vendor, kind)
    (card,) = find_cards(tmp_path)
    assert (card.vendor, card.has_driver) == (name, False)


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("dev/nvidia0", "NVIDIA"),
        ("proc/driver/nvidia/gpus/0000:01:00.0", "NVIDIA"),
        ("usr/lib/wsl/lib/libcuda.so.1", "NVIDIA"),
        ("dev/kfd", "AMD"),
    ],
)
def test_cards_are_seen_by_their_driver(tmp_path: Path, trace: str, name: str) -> None:
    touch(tmp_path, trace)
    (card,) = find_cards(tmp_path)
    assert (card.vendor, card.has_driver, card.seen) == (name, True, str(tmp_path / trace))


def test_each_vendor_is_named_once_by_its_best_evidence(tmp_path: Path) -> None:
    plug_in(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    plug_in(tmp_path, "0000:02:00.0", "0x10de", "0x030000")
    plug_in(tmp_path, "0000:03:00.0", "0x1002", "0x030000")
    touch(tmp_path, "dev/nvidia0")
    touch(tmp_path, "dev/nvidia1")
    assert [(card.vendor, card.has_driver) for card in find_cards(tmp_path)] == [
        ("NVIDIA", True),
        ("AMD", False),
    ]
