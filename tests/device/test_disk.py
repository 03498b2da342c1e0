"""Rates of a disk: measured in little, and what happens where that cannot be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from roundpipe.device import disk as room
from roundpipe.device.disk import UNKNOWN, disk_rates, existing

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rates = disk_rates(tmp_path, num_bytes=2**20, seconds=0.5)
    assert rates.write is not None
    assert rates.write > 0
    assert rates.read is not None
    assert rates.read > 0
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_written_is_forced_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[int] = []
    monkeypatch.setattr(room.os, "fsync", forced.append)
    monkeypatch.setattr(room, "_PIECE", 2**18)
    disk_rates(tmp_path, num_bytes=2**20, seconds=60)
    assert len(forced) == 4


def test_a_slow_disk_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(100))
    monkeypatch.setattr(room.time, "monotonic", lambda: float(next(now)))
    written: list[Any] = []
    monkeypatch.setattr(room.os, "write", lambda file, piece: written.append(piece) or len(piece))
    disk_rates(tmp_path, num_bytes=2**28, seconds=3)
    assert len(written) <= 3


def test_a_folder_that_takes_no_file_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_rates(tmp_path / "nowhere") == UNKNOWN
    assert disk_rates(tmp_path, num_bytes=2**60) == UNKNOWN  # there is no room

    def full(file: int, piece: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.os, "write", full)
    assert disk_rates(tmp_path, num_bytes=2**20) == UNKNOWN
    assert os.listdir(tmp_path) == []


def test_a_folder_that_will_be_made_lies_in_one_that_is_there(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert existing(tmp_path) == tmp_path
