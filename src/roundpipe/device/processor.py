"""How fast the host's processor may run, and how many of its cores a process is given.

Read from what the kernel shows. A governor called ``powersave`` holds a processor at its lowest
clock only where the kernel itself chooses clocks; drivers that choose on their own (``…pstate…``)
use that name for their usual behaviour. A virtual machine shows none of this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from roundpipe.device.cores import count_cores

_FOLDER = "sys/devices/system/cpu"
_HOLDS_LOW = "powersave"


@dataclass(frozen=True)
class Clock:
    """Hertz. ``held_by`` says what keeps ``may`` below ``could``, or ""."""

    may: float
    could: float
    held_by: str = ""


def clock(root: Path = Path("/")) -> Clock | None:
    """The clock of the slowest core beside what it could do; None where that is not shown."""
    found = [
        each
        for folder in (root / _FOLDER).glob("cpu[0-9]*/cpufreq")
        if (each := _clock(folder)) is not None
    ]
    return min(found, key=lambda each: each.may / each.could, default=None)


def machine_cores(root: Path = Path("/")) -> int | None:
    """Physical cores of the machine, whoever may use them; None where the kernel shows none."""
    names = [folder.name for folder in (root / _FOLDER).glob("cpu[0-9]*")]
    cpus = [int(name[3:]) for name in names if name[3:].isdecimal()]
    return count_cores(cpus, root, quota=False) if cpus else None


def _clock(folder: Path) -> Clock | None:
    could, may, least = (
        _hertz(folder / name)
        for name in ("cpuinfo_max_freq", "scaling_max_freq", "cpuinfo_min_freq")
    )
    if could is None or may is None:
        return None
    governor, driver = (_text(folder / f"scaling_{name}") for name in ("governor", "driver"))
    if governor == _HOLDS_LOW and "pstate" not in driver and least is not None:
        return Clock(least, could, f"the governor {governor}")
    return Clock(may, could, "a limit that was set" if may < could else "")


def _hertz(file: Path) -> float | None:
    text = _text(file)
    return int(text) * 1000.0 if re.fullmatch(r"[1-9]\d*", text) else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
