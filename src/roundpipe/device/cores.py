"""How many cores this process may compute on, and how many of them the host's own work takes.

Two logical CPUs of one core share what arithmetic and memory access need, so cores are counted, not
what the kernel calls CPUs. Containers often see all CPUs and get a quota of time. The number is
never taken from the environment: launchers set OMP_NUM_THREADS=1, with which an optimizer on the
CPU takes many times as long.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_LEFT = 2  # for the threads that issue work (Python runs one at a time) and for the caller's


def host_threads(num_cores: int) -> int:
    """Threads for optimizer and sums on the host while devices compute elsewhere."""
    return max(1, num_cores - _LEFT, num_cores // 2)


def usable_cores() -> int:
    """Physical cores that this process may use; at least one."""
    if hasattr(os, "sched_getaffinity"):
        cpus: Collection[int] = os.sched_getaffinity(0)
    else:
        cpus = range(os.cpu_count() or 1)
    return count_cores(cpus)


def count_cores(cpus: Collection[int], root: Path = Path("/"), *, quota: bool = True) -> int:
    """Physical cores that ``cpus`` belong to, within the quota of time that a container has.

    A CPU of which the kernel does not say whose sibling it is counts as a core. ``quota`` False:
    all of them, as if there were no such quota.
    """
    folder = root / "sys/devices/system/cpu"
    cores = {_text(folder / f"cpu{n}/topology/thread_siblings_list") or f"{n}" for n in cpus}
    given = _quota(root / "sys/fs/cgroup") if quota else None
    return max(1, len(cores) if given is None else min(len(cores), math.ceil(given)))


def _quota(folder: Path) -> float | None:
    """CPUs' worth of time, from either version of cgroups; None: no limit."""
    text = _text(folder / "cpu.max") or " ".join(
        _text(folder / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")
    )
    found = re.fullmatch(r"(\d+) (\d+)", text)
    return int(found.group(1)) / int(found.group(2)) if found and int(found.group(2)) else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
