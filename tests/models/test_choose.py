"""Choosing a chain costs no import that the module did not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

WRAP = """
import sys
from torch import nn
from roundpipe.models.choose import spec_for
assert len(spec_for(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).layers) == 2
assert "transformers" not in sys.modules and "peft" not in sys.modules
"""


def test_wrapping_a_sequential_does_not_import_transformers():
    done = subprocess.run(
        [sys.executable, "-c", WRAP],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
