from pathlib import Path

import pytest

from roundpipe.finetune.host_memory import usable_bytes, used_bytes


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 8192), ("max\n", 8192), ("4096\n", 4096), ("9999999\n", 8192)]
)
def test_a_container_may_use_less_than_the_machine_has(
    tmp_path: Path, limit: str | None, expected: int
) -> None:
    write(tmp_path, "meminfo", "MemTotal:       8 kB\nMemFree: 1 kB\n")
    if limit is not None:
        write(tmp_path, "fs/cgroup/memory.max", limit)
    assert usable_bytes(proc=tmp_path, sys=tmp_path) == expected


def test_a_system_that_does_not_say_is_not_guessed_about(tmp_path: Path) -> None:
    assert used_bytes(proc=tmp_path) is None
    assert usable_bytes(proc=tmp_path, sys=tmp_path) is None


def test_resident_pages_are_counted_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, "self/statm", "100 3 2 1 0 5 0\n")
    assert used_bytes(proc=tmp_path) == 3 * __import__("mmap").PAGESIZE
