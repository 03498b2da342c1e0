"""What holds for every test: no downloads, the same random examples, no thread left behind."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports transformers, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples on every run and every machine; this machine's speed is not a failure.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

_SECONDS_TO_END = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs more cards than there are."""
    wanting = [(item, item.get_closest_marker("gpu")) for item in items]
    if not any(mark for _, mark in wanting):
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, mark in wanting:
        if mark is not None:
            needed = mark.kwargs.get("n", mark.args[0] if mark.args else 1)
            if needed > there:
                reason = f"needs CUDA devices: {needed}, there are {there}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _ends_its_threads() -> Iterator[None]:
    """Fail a test that leaves a thread running which was not there before it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _SECONDS_TO_END
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        # A foreign thread that once ran Python (autograd's) cannot be joined and is not ours.
        if not isinstance(thread, threading._DummyThread):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"thread left running: {thread.name}"
