"""Which graphics cards a machine has, whether or not torch can use them.

Asked only to tell a machine without a card from one whose card goes unused: the second must not
train on the CPU without a word. Looks at what the kernel shows and runs nothing. A container sees
the cards of its machine on the PCI bus though no device node was passed in; that is a card which
torch cannot use, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# PCI classes: display controllers (VGA, 3D) and processing accelerators.
_CLASSES = ("0x03", "0x12")


@dataclass(frozen=True)
class Card:
    """Cards of one vendor, and where they were seen."""

    vendor: str  # "NVIDIA" or "AMD"
    seen: str  # e.g. "/dev/nvidia0"
    has_driver: bool  # a device node or the driver's own files are there


def find_cards(root: Path = Path("/")) -> list[Card]:
    """The vendors of which a card is there, each once, best evidence first."""
    found: dict[str, Card] = {}
    for card in (*_driver_traces(root), *_on_the_bus(root)):
        found.setdefault(card.vendor, card)
    return list(found.values())


def _driver_traces(root: Path) -> list[Card]:
    places = (
        ("NVIDIA", "dev", "nvidia[0-9]*"),
        ("NVIDIA", "proc/driver/nvidia/gpus", "*"),
        ("NVIDIA", "usr/lib/wsl/lib", "libcuda.so*"),
        ("AMD", "dev", "kfd"),
    )
    return [
        Card(vendor, str(trace), has_driver=True)
        for vendor, folder, pattern in places
        for trace in sorted((root / folder).glob(pattern))
    ]


def _on_the_bus(root: Path) -> list[Card]:
    cards = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor = _VENDORS.get((device / "vendor").read_text().strip())
            kind = (device / "class").read_text()
        except OSError:
            continue
        if vendor is not None and kind.startswith(_CLASSES):
            cards.append(Card(vendor, str(device), has_driver=False))
    return cards
