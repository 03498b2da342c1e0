"""Clocks and cores, read from invented files of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roundpipe.device.processor import Clock, clock, machine_cores

if TYPE_CHECKING:
    from pathlib import Path


def core(root: Path, number: int, **files: str) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{number}/cpufreq"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("governor", "driver", "expected"),
    [
        ("performance", "acpi-cpufreq", Clock(3.6e9, 3.6e9)),
        ("powersave", "intel_pstate", Clock(3.6e9, 3.6e9)),  # its usual governor
        ("powersave", "amd-pstate-epp", Clock(3.6e9, 3.6e9)),
        ("powersave", "acpi-cpufreq", Clock(0.8e9, 3.6e9, "the governor powersave")),
    ],
)
def test_a_governor_holds_the_clock_only_where_the_kernel_sets_it(
    tmp_path: Path, governor: str, driver: str, expected: Clock
) -> None:
    core(
        tmp_path,
        0,
        cpuinfo_max_freq="3600000",
        cpuinfo_min_freq="800000",
        scaling_max_freq="3600000",
        scaling_governor=governor,
        scaling_driver=driver,
    )
    assert clock(tmp_path) == expected


def test_the_slowest_core_counts(tmp_path: Path) -> None:
    for number, most in enumerate(("3600000", "1200000", "2400000")):
        core(tmp_path, number, cpuinfo_max_freq="3600000", scaling_max_freq=most)
    assert clock(tmp_path) == Clock(1.2e9, 3.6e9, "a limit that was set")


def test_a_machine_that_shows_no_clock_has_none(tmp_path: Path) -> None:
    assert clock(tmp_path) is None
    core(tmp_path, 0, cpuinfo_max_freq="<unknown>", scaling_max_freq="0")
    assert clock(tmp_path) is None


def test_the_cores_of_a_machine_are_counted_without_the_quota_of_a_container(
    tmp_path: Path,
) -> None:
    assert machine_cores(tmp_path) is None
    for number in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 2},{number % 2 + 2}")
    (tmp_path / "sys/devices/system/cpu/cpuidle").mkdir()
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("100000 100000")
    assert machine_cores(tmp_path) == 2
