"""``roundpipe doctor`` for real: this machine is measured, and its file describes it again."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from roundpipe.finetune.forecast.machines import load_machine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.accept


def test_this_machine_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "roundpipe", "doctor", "devices=cpu*2", "--json", "--output", file],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert all(device["is_intact"] for device in values["measured"]["devices"])
    assert load_machine(str(file)) == load_machine(values["machine"])
