"""How the cards are attached: lanes and generation of their slots, and the nodes of host memory.

Read from what the kernel shows; nothing is run, and whatever is not shown is None. A card lowers
the speed of its link while idle but keeps its lanes, so the speed is taken from what card and slot
can do, the lanes from what they have now. A virtual machine invents the slot, not the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# GT/s of one lane -> generation of PCIe
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_MOST_LANES = 16  # a port may be 32 wide; no card is


@dataclass(frozen=True)
class Slot:
    """A card's place on the bus. None: not shown."""

    lanes: int | None = None  # in use
    card_lanes: int | None = None  # that the card has
    generation: int | None = None  # the lower of card and slot
    card_generation: int | None = None
    node: int | None = None  # of host memory that is near


@dataclass(frozen=True)
class MemoryNode:
    """Host memory that some of the cores are near to."""

    index: int
    num_bytes: int
    cores: frozenset[int]


def slot_of(bus: str, root: Path = Path("/")) -> Slot:
    """The slot of the card at ``bus``, e.g. ``0000:01:00.0``."""
    if not bus:
        return Slot()
    card = root / "sys/bus/pci/devices" / bus
    card_generation = _generation(card)
    port = None if is_virtual(root) else _generation(card.resolve().parent)
    known = [each for each in (card_generation, port) if each is not None]
    node = _number(card / "numa_node")
    return Slot(
        lanes=_lanes(card / "current_link_width"),
        card_lanes=_lanes(card / "max_link_width"),
        generation=min(known, default=None),
        card_generation=card_generation,
        node=node if node is not None and node >= 0 else None,
    )


def memory_nodes(root: Path = Path("/")) -> tuple[MemoryNode, ...]:
    """The nodes that have memory, in order; empty where the kernel shows none."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        if total is not None and int(total.group(1)) > 0:
            index = int(folder.name.removeprefix("node"))
            cores = _ranges(_text(folder / "cpulist"))
            nodes.append(MemoryNode(index, int(total.group(1)) * 1024, cores))
    return tuple(sorted(nodes, key=lambda node: node.index))


def is_virtual(root: Path = Path("/")) -> bool:
    """Whether this is a virtual machine, by what its processors say."""
    return re.search(r"^flags\s*:.*\bhypervisor\b", _text(root / "proc/cpuinfo"), re.M) is not None


def _generation(device: Path) -> int | None:
    found = re.match(r"([\d.]+) GT/s", _text(device / "max_link_speed"))
    return None if found is None else _GENERATIONS.get(found.group(1))


def _lanes(file: Path) -> int | None:
    number = _number(file)
    return number if number is not None and 1 <= number <= _MOST_LANES else None


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _ranges(text: str) -> frozenset[int]:
    """The numbers of ``0-3,8``."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(
        core for first, last in found for core in range(int(first), int(last or first) + 1)
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
