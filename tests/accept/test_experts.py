"""Mixtures of experts: what grows with their number, and what a device holds of a large one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(3600)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *arguments):
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"\n{done.stdout}{done.stderr}")  # noqa: T201 - the figures
    assert done.returncode == 0
    return done.stdout


def test_operations_do_not_grow_with_the_number_of_experts_and_time_hardly():
    run("experts.py")


def test_three_layers_of_the_largest_published_model_stay_within_plan_and_limit():
    run("_miniature.py")
