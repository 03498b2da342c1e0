"""``benchmarks/gpu_check.py`` in small on the CPU, so that it still runs when a card is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
IN_PROCESS = (
    "exactness",
    "sanitizer",
    "link",
    "train_full",
    "train_lora",
    "longest",
    "miniature",
    "graph",
)


@pytest.fixture(scope="module")
def sections():
    sys.path.insert(0, str(SCRIPT.parent))
    import _gpu_sections

    yield _gpu_sections
    sys.path.remove(str(SCRIPT.parent))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries; what they say is not ours to mend
@pytest.mark.parametrize("name", IN_PROCESS)
def test_each_check_runs_and_says_something(sections, name):
    rig = sections.Rig(torch.device("cpu"), tiny=True)
    sections.SECTIONS[name](rig)
    assert rig.rows
    if name == "exactness":
        assert all(row.met for row in rig.rows)
    json.dumps(rig.to_json())


@pytest.mark.accept  # a process that imports all there is
def test_the_whole_script_makes_a_table_and_a_file(tmp_path):
    """With the one check that needs a process of its own, for its process group."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device=cpu", "--tiny", f"--json={file}"]
    done = subprocess.run(
        [*command, "--only", "fsdp"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FSDP2" in done.stdout
    found = json.loads(file.read_text())
    assert found["sections"]["fsdp"]["rows"]


def test_every_check_has_a_time_limit(sections):
    sys.path.insert(0, str(SCRIPT.parent))
    import gpu_check

    assert gpu_check.LIMITS.keys() == sections.SECTIONS.keys()
    assert gpu_check.TOTAL_SECONDS < 360
