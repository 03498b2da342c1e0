"""What a machine can do: devices, the links to them, and the host. The planner's only view of it.

Rates are bytes or floating point operations per second, sizes bytes. A number here is what work
really gets (matrix products of a transformer, long copies of pinned memory), not what a data sheet
promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of device. ``flops`` a second are by arithmetic: a dtype and how products add up.

    ``bandwidth``: of its own memory, bytes a second. ``in_host``: what it holds is host memory.
    Keys of ``flops``: ``fp32``, ``tf32``, ``bf16``, ``fp16`` (products added in fp32) and
    ``fp16_fp16`` (added in fp16, twice as fast on consumer cards).
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float  # of its own memory
    in_host: bool = False  # a CPU device: what it holds is host memory, beside the host's own


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between the host and one device: ``up`` to it and ``down`` from it, bytes a second.

    ``duplex`` is what is left of a rate while both ways run, 1.0 for all of it.
    """

    up: float  # host -> device
    down: float  # device -> host
    duplex: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host. ``bandwidth`` of its memory, bytes a second, is shared by all that moves there:

    transfers, sums of gradients and the optimizer; ``update_bandwidth`` bounds what an update moves
    alone. ``disk_bytes``: free on the disk; None: unknown.
    """

    memory_bytes: int
    bandwidth: float
    disk_bytes: int | None = None  # free; None: unknown
    update_bandwidth: float | None = None  # what an update moves alone; None: all of ``bandwidth``


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices with one link each, and their host.

    ``link_cap``: of all links together, each way, bytes a second; None: what each has alone.
    """

    cards: tuple[Card, ...]
    links: tuple[Link, ...]
    host: Host
    link_cap: float | None = None
    text: str = field(default="", compare=False)  # as the user wrote it
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was assumed, for people

    @property
    def num_devices(self) -> int:
        """How many devices the machine has."""
        return len(self.cards)
