"""What the system's own tool says of NVIDIA cards: power limits, and who else holds memory.

The tool may be missing, refuse, or print words in place of numbers: then the answer is None, which
is not the same as nothing.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Sequence[str]], str | None]

_SECONDS = 10.0
_LOST_WORDS = "ecc.errors.uncorrected.volatile.total"
_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")
_SWITCHES = {"Enabled": True, "Disabled": False}
_SLOWERS = {
    "hw_thermal_slowdown": "its heat",
    "sw_thermal_slowdown": "its heat",
    "hw_power_brake_slowdown": "the power supply's alarm",
}


@dataclass(frozen=True)
class Process:
    """Another process on a card; ``num_bytes`` of its memory, or None where that is not told."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True)
class CardState:
    """Watts and counts; None: not told."""

    power_limit: float | None
    power_default: float | None
    is_kept_ready: bool | None = None  # the driver stays loaded between programs
    lost_words: int | None = None  # errors of its memory that could not be corrected


@dataclass(frozen=True)
class Slowed:
    """What holds a card back while it works, in words; ``degrees`` Celsius or None."""

    by: tuple[str, ...]
    degrees: float | None


def run_tool(command: Sequence[str]) -> str | None:
    """What ``command`` prints; None if it is missing, fails, or takes longer than ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout


def card_states(run: Run = run_tool) -> dict[str, CardState] | None:
    """The state of every card by its place on the PCI bus; None if the tool does not answer."""
    text = _query(run, "gpu", ("pci.bus_id", "power.limit", "power.default_limit"))
    if text is None:
        return None
    # Asked apart: a driver that does not know one field answers none of its question.
    more = _query(run, "gpu", ("pci.bus_id", "persistence_mode", _LOST_WORDS)) or ""
    known = {_bus(bus): (ready, lost) for bus, ready, lost in _rows(more, 3)}
    states = {}
    for bus, limit, default in _rows(text, 3):
        ready, lost = known.get(_bus(bus), ("", ""))
        words = _number(lost)
        states[_bus(bus)] = CardState(
            _number(limit),
            _number(default),
            is_kept_ready=_SWITCHES.get(ready),
            lost_words=None if words is None else int(words),
        )
    return states


def what_slows(run: Run = run_tool) -> dict[str, Slowed]:
    """What holds back each card now, by place on the bus; asked while they work."""
    for reasons in _REASONS:  # newer drivers have another name for the same
        fields = tuple(f"{reasons}.{name}" for name in _SLOWERS)
        text = _query(run, "gpu", ("pci.bus_id", "temperature.gpu", *fields))
        rows = _rows(text or "", 2 + len(fields))
        if rows:
            return {_bus(row[0]): Slowed(_active(row[2:]), _number(row[1])) for row in rows}
    return {}


def _active(told: Sequence[str]) -> tuple[str, ...]:
    """The words of the reasons that are active, each once."""
    pairs = zip(_SLOWERS.values(), told, strict=True)
    return tuple(dict.fromkeys(words for words, state in pairs if state == "Active"))


def processes(run: Run = run_tool) -> dict[str, list[Process]] | None:
    """Who computes on the cards, by place on the PCI bus; None if the tool does not answer."""
    text = _query(run, "compute-apps", ("gpu_bus_id", "pid", "process_name", "used_memory"))
    if text is None:
        return None
    found: dict[str, list[Process]] = {}
    for bus, pid, name, mebibytes in _rows(text, 4):
        if pid.isdigit():
            used = _number(mebibytes)
            num_bytes = None if used is None else int(used * 2**20)
            process = Process(int(pid), re.split(r"[/\\]", name)[-1], num_bytes)
            found.setdefault(_bus(bus), []).append(process)
    return found


def _query(run: Run, what: str, fields: Sequence[str]) -> str | None:
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    return run(command)


def _rows(text: str, num_fields: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == num_fields]


def _bus(text: str) -> str:
    """``00000000:01:00.0`` as the kernel writes it: ``0000:01:00.0``."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text) else None
