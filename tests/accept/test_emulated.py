"""Eight emulated 4090s against the simulator, and what chunks and order rules by layer save.

Prints the table that belongs in docs/acceptance.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "emulated.py"


@pytest.mark.parametrize("model", ["1.7B", "8B", "32B"])
def test_emulated_steps_last_within_3_percent_of_what_the_simulator_says(model):
    command = [sys.executable, SCRIPT, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"\n{done.stdout}{done.stderr}")  # noqa: T201 - the figures
    assert done.returncode == 0
