"""What surrounds the cards where nobody says: links by PCIe, hosts by kind, the CPU as a card.

Each figure is a guess for a machine of its kind, with its reason beside it; a machine's text or
file overrides it, and `roundpipe doctor` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe.plan.machine import Card, Link

# GB/s of one lane one way, before packet headers, by generation of PCIe.
_LANE = {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0, 5: 4.0, 6: 8.0}
GENERATIONS = range(1, 7)
# Long copies of pinned memory: 24-26 GB/s on PCIe 4.0 x16, measured on eight 4090s.
_LINK_SHARE = 0.78


@dataclass(frozen=True)
class HostKind:
    """``lanes``: PCIe lanes for cards. Together they bound what all links move each way."""

    name: str
    memory_bytes: int
    bandwidth: float
    lanes: int


# Two channels of DDR4 or DDR5 sustain 40-70 GB/s; the CPU gives its 16 lanes to the cards together.
DESKTOP = HostKind("desktop", 64 * 10**9, 60e9, 16)
# Eight channels of DDR4 sustain about 150 GB/s; two sockets have 128 lanes or more.
SERVER = HostKind("server", 512 * 10**9, 150e9, 128)
# Where PCIe is 5.0, memory is DDR5: eight channels sustain about 250 GB/s.
SERVER_DDR5 = HostKind("server with DDR5", 512 * 10**9, 250e9, 128)

_DESKTOP_CARDS = 4  # more do not fit a desktop board
_SERVER_MEMORY = 256 * 10**9  # more than two channels take


def host_kind(num_cards: int, memory_bytes: int | None, generation: int) -> HostKind:
    """A server for more than four cards or from 256 GB on, else a desktop."""
    if num_cards <= _DESKTOP_CARDS and (memory_bytes or 0) < _SERVER_MEMORY:
        return DESKTOP
    return SERVER_DDR5 if generation >= 5 else SERVER


def lanes_each(kind: HostKind, num_cards: int) -> int:
    """Lanes of one card where ``num_cards`` share a host: 16, 8 or 4, as boards split them."""
    share = kind.lanes / max(1, num_cards)
    return next((lanes for lanes in (16, 8, 4) if lanes <= share), 4)


def pcie_rate(generation: int, lanes: int) -> float:
    """Bytes per second that long copies of pinned memory get one way."""
    return _LANE[generation] * lanes * _LINK_SHARE * 1e9


def pcie_link(generation: int, lanes: int, *, duplex: float) -> Link:
    """A link over so many lanes, as fast up as down."""
    rate = pcie_rate(generation, lanes)
    return Link(up=rate, down=rate, duplex=duplex)


# A core with 256-bit vectors: 32 fp32 operations a cycle at 3 GHz, of which matrix products get
# six tenths. 16-bit types are converted on the way in most CPUs: half.
_CORE_FLOPS = 32 * 3e9 * 0.6
_CORES = 8  # of a machine about which nothing is known
_CPU_COPY = 8e9  # bytes per second: one thread from memory to memory


def cpu_card(num_devices: int, *, memory_bytes: int, bandwidth: float, cores: int = _CORES) -> Card:
    """One of ``num_devices`` CPU devices that share ``cores`` and a host's memory evenly.

    Half of the host's memory is for devices: the rest holds what waits on the host.
    """
    rate = _CORE_FLOPS * cores / num_devices
    return Card(
        name="cpu",
        memory_bytes=memory_bytes // 2 // num_devices,
        flops={"fp32": rate, "bf16": rate / 2, "fp16": rate / 2},
        bandwidth=bandwidth / num_devices,
        in_host=True,
    )


def cpu_link() -> Link:
    """Between host and CPU device: a copy by one thread; the other way is another thread's."""
    return Link(up=_CPU_COPY, down=_CPU_COPY)
