"""What is slower than the suite may be; run by ``make accept``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """The same number of threads for each device and for the plain loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _bars_without_a_thread(monkeypatch):
    """Bars of other libraries that run for ten seconds would leave a watching thread behind."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture(scope="session")
def smollm2():
    """The functions of ``tests/numbers/smollm2.py``."""
    place = Path(__file__).parents[1] / "numbers" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules["smollm2"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
