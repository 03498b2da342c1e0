"""What plans for a pool stand on: its machine, what its devices hold and how fast each is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.device.accumulation import adds_up_in_fp16
from roundpipe.device.emulated import EmulatedDevice
from roundpipe.device.host_memory import host_memory
from roundpipe.device.survey import survey_devices
from roundpipe.errors import RoundPipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.engine.pool import DevicePool
    from roundpipe.plan.machine import Machine

logger = logging.getLogger(__name__)

# On the CPU a copy takes a core's time from computing.
_CPU_COPY_SECONDS_PER_BYTE = 1.5e-10
# What is left of a card's free memory for what nobody declares: libraries' workspaces, pieces of
# the allocator's blocks, a batch that is longer than the one that was measured.
_KEPT_SHARE, _KEPT_BYTES = 0.06, 256 << 20
_HOST_SHARE = 0.6  # of free host memory that all CPU devices together may hold
_ALIKE = 0.02  # devices whose rates differ by less are alike
_HALF = "fp16_fp16"  # where products are added up in fp16
_ARITHMETIC = ("bf16", "fp16", "tf32", "fp32")  # which rates tell devices apart, best first


@dataclass(frozen=True)
class Ground:
    """See the module docstring.

    ``machine`` is None where it cannot be told. ``memory_limit``: bytes that a device may hold;
    ``soft_limit``: bytes that it had better not exceed where nothing limits it. ``speeds`` are
    relative to the first device; None: all alike. ``flops``: of the first device, 0 if unknown.
    """

    machine: Machine | None = None
    memory_limit: int | None = None
    soft_limit: int | None = None
    speeds: tuple[float, ...] | None = None
    is_emulated: bool = False
    is_on_cpu: bool = False

    @property
    def copy_seconds_per_byte(self) -> float:
        """What copies take from a device's compute."""
        return _CPU_COPY_SECONDS_PER_BYTE if self.is_on_cpu else 0.0

    @property
    def played_machine(self) -> Machine | None:
        """The machine whose links and memory a plan is played on; the CPU's are its compute's."""
        return None if self.is_on_cpu else self.machine

    @property
    def flops(self) -> float:
        """What the first device computes in a second; 0 if unknown."""
        card = self.machine.cards[0] if self.machine is not None else None
        names = (_HALF, *_ARITHMETIC) if adds_up_in_fp16() else _ARITHMETIC
        rates = [] if card is None else [card.flops.get(name, 0.0) for name in names]
        return next((rate for rate in rates if rate), 0.0)


def ground_of(pool: DevicePool, memory_limit: int | None) -> Ground:
    """Look at a pool's devices; ``memory_limit`` is what the user lets each of them hold.

    What cannot be found out is left open, with a warning.
    """
    if pool.is_emulated:
        machine = _emulated_machine(pool)
        return Ground(machine, memory_limit, speeds=speeds_of(machine), is_emulated=True)
    try:
        machine = survey_devices(pool.devices)
    except (RoundPipeError, OSError, RuntimeError) as error:
        logger.warning("this machine cannot be told: %s; plans take transfers for free", error)
        return Ground(None, memory_limit, is_on_cpu=pool.computes_on_cpu)
    if pool.computes_on_cpu:
        return Ground(machine, memory_limit, _host_share(len(pool.devices)), is_on_cpu=True)
    free = [_usable(card.memory_bytes) for card in machine.cards]
    held = [memory_limit or limit for limit in free]
    cards = tuple(
        replace(card, memory_bytes=limit) for card, limit in zip(machine.cards, held, strict=True)
    )
    return Ground(replace(machine, cards=cards), min(held), speeds=speeds_of(machine))


def speeds_of(machine: Machine) -> tuple[float, ...] | None:
    """How fast each device is, relative to the first; None if they are alike or unknown."""
    for name in _ARITHMETIC:
        rates = [card.flops.get(name, 0.0) for card in machine.cards]
        if all(rates):
            speeds = tuple(rate / rates[0] for rate in rates)
            return speeds if max(speeds) > min(speeds) * (1 + _ALIKE) else None
    return None


def _emulated_machine(pool: DevicePool) -> Machine:
    """The machine of the pool's devices, which may be some of it, in the pool's order."""
    devices: Sequence[EmulatedDevice] = [d for d in pool.devices if isinstance(d, EmulatedDevice)]
    machine = devices[0].clock.machine
    return replace(
        machine,
        cards=tuple(machine.cards[device.index] for device in devices),
        links=tuple(machine.links[device.index] for device in devices),
    )


def _usable(free_bytes: int) -> int:
    return max(int(free_bytes * (1 - _KEPT_SHARE)) - _KEPT_BYTES, 0)


def _host_share(num_devices: int) -> int | None:
    memory = host_memory()
    return None if memory is None else int(memory.free_bytes * _HOST_SHARE) // num_devices
