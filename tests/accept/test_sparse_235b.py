"""A model of 470 GB takes one step on a machine with far less memory, from mapped files.

Each of its 94 layers has 5 GB, and two at a time have a slot, however many there are. The files are
sparse: they need a file system that knows holes. Takes some 20 minutes on two cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "_sparse.py"


def test_a_model_of_470_gb_trains_in_a_process_of_less_than_12():
    command = [sys.executable, "-W", "ignore", SCRIPT, "94"]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            print(line, end="", flush=True)  # noqa: T201 - how far it is
            said.append(line)
    assert child.returncode == 0
    assert float(re.search(r"([\d.]+) GB mapped", said[0])[1]) > 470
    last = re.search(r"loss ([\d.]+), held ([\d.]+) GB", said[-1])
    assert float(last[1]) == pytest.approx(11.931, abs=1e-3)  # all logits are alike: ln 151,936
    assert float(last[2]) < 12
