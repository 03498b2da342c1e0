"""How much host memory this process uses, and how much it may use; known on Linux only."""

from __future__ import annotations

import mmap
from pathlib import Path

_CGROUP_LIMITS = ("fs/cgroup/memory.max", "fs/cgroup/memory/memory.limit_in_bytes")


def used_bytes(proc: Path = Path("/proc")) -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        pages = (proc / "self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * mmap.PAGESIZE


def usable_bytes(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """What the machine has, or what the container may use where that is less."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    limits = [_read_limit(sys / file) for file in _CGROUP_LIMITS]
    return min([total, *(limit for limit in limits if limit is not None)])


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
