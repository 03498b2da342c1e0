"""Half a billion parameters: wrapping makes no second copy, training holds what was said it would.

Prints the figures that belong in docs/acceptance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "_half_billion.py"
MORE = 0.8e9  # bytes: Python, PyTorch and transformers are half of them


def test_half_a_billion_parameters_train_in_16_bytes_each_and_what_the_devices_take():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process can be measured on Linux only")
    command = [sys.executable, "-W", "ignore", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    weights, state = 2 * found["parameters"], 16 * found["parameters"]
    allowed = state + found["device_bytes"] + MORE
    print(  # noqa: T201 - the figures
        f"\n{found['parameters'] / 1e9:.3f}e9 parameters in bf16, {weights / 1e9:.2f} GB; wrapped "
        f"in {found['wrap_seconds']:.2f} s ({found['wrap_cpu_seconds']:.2f} s of a core), for that "
        f"{found['wrap_peak'] / 1e9:.2f} GB more at the worst moment and "
        f"{found['wrap_kept'] / 1e9:.2f} GB afterwards; held {found['peak'] / 1e9:.2f} GB in three "
        f"steps, allowed {allowed / 1e9:.2f}: 16 bytes a parameter {state / 1e9:.2f}, "
        f"two devices {found['device_bytes'] / 1e9:.2f}, and 0.8; steps took "
        + ", ".join(f"{seconds:.1f}" for seconds in found["step_seconds"])
        + " s"
    )
    assert found["parameters"] > 0.5e9
    assert found["wrap_peak"] < 0.25 * weights
    assert found["wrap_kept"] < 0.1 * weights
    assert found["peak"] < allowed
    assert found["losses"][-1] < 12
