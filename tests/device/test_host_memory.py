"""What a process may use of a machine's memory, by invented files of the system."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

from roundpipe.device.host_memory import HostMemory, host_memory, huge_pages, is_wsl, used_bytes

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1024


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 KiB, of which 600 are available."""
    write(
        tmp_path,
        {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"},
    )
    return tmp_path


def memory(root: Path) -> HostMemory:
    found = host_memory(root)
    assert found is not None
    return found


def kib(found: HostMemory) -> tuple[int, int]:
    return found.usable_bytes // KIB, found.free_bytes // KIB


def test_without_groups_the_machine_is_the_limit(root: Path) -> None:
    assert kib(memory(root)) == (1000, 600)
    assert memory(root).limited_by == ""


def v2(group: str, limit: str, used: int = 0, cached: int = 0, **more: str) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{group}memory.max": limit,
        f"sys/fs/cgroup/{group}memory.current": str(used * KIB),
        f"sys/fs/cgroup/{group}memory.stat": f"anon 7\ninactive_file {cached * KIB}\n",
        **{f"sys/fs/cgroup/{group}memory.{key}": text for key, text in more.items()},
    }


def test_a_container_may_use_less_than_its_machine(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/\n", **v2("", str(400 * KIB), used=100)})
    assert kib(memory(root)) == (400, 300)
    assert "group" in memory(root).limited_by


def test_the_page_cache_of_a_group_is_free(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/\n", **v2("", str(400 * KIB), used=390, cached=350)})
    assert kib(memory(root)) == (400, 360)


def test_what_the_machine_has_left_bounds_what_a_group_has(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/\n", **v2("", str(900 * KIB), used=0)})
    assert kib(memory(root)) == (900, 600)


def test_a_group_around_ours_counts_too(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/jobs/42\n",
            **v2("jobs/42/", str(500 * KIB), used=10),
            **v2("jobs/", str(450 * KIB), used=250),
        },
    )
    assert kib(memory(root)) == (450, 200)


def test_a_group_that_is_throttled_earlier_is_limited_there(root: Path) -> None:
    limits = v2("", "max", used=100, high=str(300 * KIB))
    write(root, {"proc/self/cgroup": "0::/\n", **limits})
    assert kib(memory(root)) == (300, 200)


@pytest.mark.parametrize("limit", ["max\n", str(5000 * KIB), "nonsense"])
def test_a_limit_that_limits_nothing_is_none(root: Path, limit: str) -> None:
    write(root, {"proc/self/cgroup": "0::/\n", **v2("", limit, used=999)})
    assert kib(memory(root)) == (1000, 600)
    assert memory(root).limited_by == ""


def v1(group: str, limit: int, used: int = 0, cached: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{group}"
    return {
        f"{folder}memory.limit_in_bytes": str(limit),
        f"{folder}memory.usage_in_bytes": str(used * KIB),
        f"{folder}memory.stat": f"cache 1\ntotal_inactive_file {cached * KIB}\n",
    }


def test_the_first_version_of_groups_is_read(root: Path) -> None:
    groups = "9:name=systemd:/\n5:cpu,memory:/box\n4:cpuset:/other\n0::/\n"
    write(
        root,
        {
            "proc/self/cgroup": groups,
            **v1("", 9223372036854771712),
            **v1("box/", 300 * KIB, used=200, cached=100),
        },
    )
    assert kib(memory(root)) == (300, 200)


def test_a_container_that_sees_its_hosts_path_finds_its_limit_at_the_top(root: Path) -> None:
    write(root, {"proc/self/cgroup": "4:memory:/docker/0123abc\n", **v1("", 300 * KIB, used=50)})
    assert kib(memory(root)) == (300, 250)


def test_a_path_that_leads_out_of_the_groups_is_not_followed(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/../../../x\n", **v2("", str(300 * KIB))})
    assert memory(root).usable_bytes == 300 * KIB


def test_linux_inside_windows_is_told(root: Path) -> None:
    assert not is_wsl(root)
    write(root, {"proc/version": "Linux version 6.6 (x@y) microsoft-standard-WSL2\n"})
    assert is_wsl(root)
    assert ".wslconfig" in memory(root).limited_by


def test_a_system_that_does_not_say_is_not_guessed_about(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    assert used_bytes(tmp_path) is None


def test_resident_pages_are_counted_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/statm": "100 3 2 1 0 5 0\n"})
    assert used_bytes(tmp_path) == 3 * mmap.PAGESIZE


def test_this_machine_has_memory_if_it_says_so() -> None:
    found = host_memory()
    assert found is None or 0 < found.free_bytes <= found.usable_bytes <= found.machine_bytes


def test_what_lies_in_swap_is_told_apart_from_what_is_free_there(root: Path) -> None:
    text = (root / "proc/meminfo").read_text() + "SwapTotal: 500 kB\nSwapFree: 200 kB\n"
    (root / "proc/meminfo").write_text(text)
    memory = host_memory(root)
    assert memory is not None
    assert (memory.swap_bytes, memory.swapped_bytes) == (200 * KIB, 300 * KIB)


@pytest.mark.parametrize(
    ("text", "word"),
    [("always [madvise] never", "madvise"), ("always madvise [never]", "never"), ("", "")],
)
def test_whether_the_kernel_gives_large_pages(root: Path, text: str, word: str) -> None:
    write(root, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert huge_pages(root) == word
