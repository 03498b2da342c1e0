"""What was measured of a machine, as data: `doctor.py` judges it, a file and JSON keep it.

Rates are bytes or floating point operations per second, sizes bytes. None: could not be known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Between host and a device. ``duplex``: what is left of a rate when both ways run."""

    up: float
    down: float
    duplex: float


@dataclass(frozen=True, kw_only=True)
class OtherProcess:
    """A process that is not ours and holds memory of a card."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How a card is attached, and how it could be."""

    used: int | None = None
    of_card: int | None = None
    generation: int | None = None  # of PCIe
    of_card_generation: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceReadings:
    """One device. ``usual_…``: what a card of its name does; empty or None for an unknown one."""

    name: str  # cuda:0
    card: str  # RTX 4090
    is_cpu: bool
    flops: Mapping[str, float]
    bandwidth: float
    pinned: CopyRates
    pageable: CopyRates | None  # None: the same, nothing is pinned for this device
    is_intact: bool  # whether bytes come back as they went
    total_bytes: int
    free_bytes: int
    usual_flops: Mapping[str, float] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    node: int | None = None
    power_limit: float | None = None
    power_default: float | None = None
    processes: tuple[OtherProcess, ...] = ()
    is_kept_ready: bool | None = None  # its driver stays loaded between programs
    lost_words: int | None = None  # errors of its memory that were not corrected
    slowed_by: tuple[str, ...] = ()  # what held it back while it worked
    degrees: float | None = None  # Celsius, while it worked


@dataclass(frozen=True, kw_only=True)
class NodeReadings:
    """Host memory that some cores are near to. ``is_ours``: whether we may run on one of them."""

    index: int
    num_bytes: int
    is_ours: bool


@dataclass(frozen=True, kw_only=True)
class HostReadings:
    """The host. ``update_seconds``: of one parameter, by our optimizer on ``update_threads``.

    ``not_compiled`` says why the optimizer runs in PyTorch, or "". ``cores`` may be used, of
    ``machine_cores``. ``clock``: hertz that the processor may have and could have, and what holds
    it. ``fresh``: bytes a second of memory that is touched for the first time.
    """

    threads: int
    bandwidth_one_thread: float
    bandwidth: float  # of all threads
    update_seconds: float
    machine_bytes: int | None = None
    usable_bytes: int | None = None
    limited_by: str = ""
    nodes: tuple[NodeReadings, ...] = ()
    update_threads: int | None = None  # None: all
    not_compiled: str = ""
    cores: int | None = None
    machine_cores: int | None = None
    clock: tuple[float, float, str] | None = None
    swapped_bytes: int = 0
    huge_pages: str = ""  # always, madvise, never; "": not known
    fresh: float | None = None
    is_wsl: bool = False
    usual_bandwidth: float | None = None  # of machines like it


@dataclass(frozen=True, kw_only=True)
class DiskReadings:
    """A disk that runs use. Bytes, and bytes a second; None: not known."""

    used_for: str  # "runs", "the hub's cache", "runs and the hub's cache"
    folder: str
    free_bytes: int | None
    write: float | None = None
    read: float | None = None


@dataclass(frozen=True, kw_only=True)
class PackageReadings:
    """A library that we use. ``needs``: from which version on; None: any."""

    name: str
    version: str | None  # None: not installed
    needs: str | None = None
    is_enough: bool = True
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SoftwareReadings:
    """What runs would run on. ``variables``: what the shell says of what matters here.

    ``unused_cards``: cards that are there and were not asked for, in words. ``num_cards``: how many
    the system's tool shows; None: it does not answer.
    """

    python: str = ""
    torch: str = ""
    packages: tuple[PackageReadings, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    has_hub_token: bool | None = None
    unused_cards: str = ""
    num_cards: int | None = None
    tool_seconds: float | None = None  # until the cards' tool had answered first


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All of one machine. ``unknown``: a sentence for each thing that could not be found out."""

    devices: tuple[DeviceReadings, ...]
    host: HostReadings
    all_links: float | None = None  # up, all at once; None with one device
    unknown: tuple[str, ...] = ()
    disks: tuple[DiskReadings, ...] = ()
    software: SoftwareReadings = field(default_factory=SoftwareReadings)

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)
