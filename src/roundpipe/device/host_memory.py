"""How much host memory this process uses, may use, and could have now; known on Linux only.

A process may use less than its machine has: containers and job schedulers limit groups of
processes (cgroups, version 1 or 2), and each group lies in others with limits of their own. What
is free is the least of what the machine and every group around us have left; the page cache counts
as left, since the kernel drops it when memory is asked for.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_LIMIT = 2**60  # version 1 writes a huge number where there is no limit


@dataclass(frozen=True)
class _Version:
    """What the files of a version of cgroups are called."""

    folder: str  # below /sys/fs/cgroup
    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]  # in memory.stat


_V1 = _Version(
    "memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version(
    "", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory. ``limited_by`` says what keeps us from the whole machine's, or ""."""

    usable_bytes: int  # in all, by us and others
    free_bytes: int  # what could be allocated now
    machine_bytes: int
    limited_by: str = ""
    swap_bytes: int = 0  # free on the machine, for those who would rather be slow
    swapped_bytes: int = 0  # of the machine, that lie on the disk now


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """What this process may use, and what is free of it; None where the system does not say."""
    machine = _meminfo(root)
    if machine is None:
        return None
    total, available, swap, swapped = machine
    usable, free, limited_by = total, available, ""
    for group, version in _groups(root):
        limit = _limit(group, version)
        if limit is None or limit >= total:
            continue
        if limit < usable:
            usable, limited_by = limit, f"the memory limit of a group: {group}"
        free = min(free, max(0, limit - _used(group, version)))
    if not limited_by and is_wsl(root):
        limited_by = "WSL: memory in .wslconfig"
    return HostMemory(usable, free, total, limited_by, swap, swapped)


def used_bytes(root: Path = Path("/")) -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        pages = (root / "proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * mmap.PAGESIZE


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Linux inside Windows, which gives it a part of the machine's memory."""
    return "microsoft" in _text(root / "proc/version").lower()


def huge_pages(root: Path = Path("/")) -> str:
    """Whether the kernel gives large pages to those who ask: always, madvise, never; "": unsaid."""
    found = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found.group(1) if found else ""


def _meminfo(root: Path) -> tuple[int, int, int, int] | None:
    """Total and available bytes, free and used ones of swap."""
    text = _text(root / "proc/meminfo")
    found = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    if "MemTotal" not in found:
        return None
    total = found["MemTotal"]
    available = found.get("MemAvailable", found.get("MemFree", total))
    swap = found.get("SwapFree", 0)
    return total, available, swap, found.get("SwapTotal", swap) - swap


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """The folders of every group this process is in, innermost first.

    Inside a container the path is often that of the host, which is not mounted here: its own group
    is then the top of the mount, which is looked at in any case.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        top = mount / version.folder
        here = top / path.lstrip("/")
        if top not in (here, *here.parents) or ".." in here.parts:
            here = top
        for group in (here, *here.parents):
            yield group, version
            if group == top:
                break


def _limit(group: Path, version: _Version) -> int | None:
    numbers = [_text(group / file).strip() for file in version.limits]
    limits = [int(number) for number in numbers if number.isdigit()]  # "max": no limit
    least = min(limits, default=_NO_LIMIT)
    return least if least < _NO_LIMIT else None


def _used(group: Path, version: _Version) -> int:
    usage = _text(group / version.usage).strip()
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.M))
    cached = sum(int(stat.get(key, 0)) for key in version.cached)
    return max(0, int(usage) - cached) if usage.isdigit() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
