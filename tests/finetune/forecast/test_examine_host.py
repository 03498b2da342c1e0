"""The host beside devices: which threads measure it, and what of it is read from the system."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roundpipe.device.probe import Effort
from roundpipe.finetune.forecast import examine_host as room
from roundpipe.finetune.forecast.examine_host import HostExamination, fresh_rate
from roundpipe.report.readings import CopyRates, DeviceReadings, Lanes

if TYPE_CHECKING:
    from pathlib import Path

RATES = CopyRates(up=1.0, down=1.0, duplex=1.0)
CARD = DeviceReadings(
    name="cuda:0",
    card="RTX 4090",
    is_cpu=False,
    flops={},
    bandwidth=1.0,
    pinned=RATES,
    pageable=None,
    is_intact=True,
    total_bytes=1,
    free_bytes=1,
    lanes=Lanes(generation=4),
)
CPU = replace(CARD, name="cpu", is_cpu=True, lanes=Lanes())


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostExamination:
    """A host of eight cores and 64 GB that measures nothing for long."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    monkeypatch.setattr(room, "_on_host", lambda threads, effort, measure: 1e9 * threads)
    return HostExamination(
        root=tmp_path,
        effort=Effort(0.01, 2**20, 256, 1e-4),
        cores=lambda: frozenset(range(8)),
        why_not_compiled=lambda: "",
    )


def test_beside_cards_the_optimizer_has_most_cores(how: HostExamination) -> None:
    host = how.of(10**9, [CARD])
    assert (host.cores, host.threads, host.update_threads) == (8, 6, 6)
    assert host.bandwidth == 6e9
    assert host.usual_bandwidth == 60e9  # six threads of a desktop


def test_beside_devices_on_the_cpu_the_optimizer_has_one_thread(how: HostExamination) -> None:
    host = how.of(10**9, [CPU])
    assert host.update_threads == 1
    assert host.usual_bandwidth is None


def test_memory_touched_first_has_a_rate() -> None:
    assert fresh_rate(2**20) > 0


def test_a_kernel_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe.optim.compiled import KernelError

    monkeypatch.setattr(room, "kernel", lambda: KernelError("no C++ compiler"))
    assert room.why_not_compiled() == "no C++ compiler"
