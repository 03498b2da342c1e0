"""What holds for every test: no downloads, the same random examples, no thread left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Before anything imports transformers and torch, which read them once. Threads of a pool larger
# than the machine would otherwise spin while they wait for each other: half the time of tests.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts background jobs with signals ignored, and what is ignored at the start stays so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# The same examples on every run and every machine; this machine's speed is not a failure.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

_SECONDS_TO_END = 5.0
_GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew; then read the diff"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: what ``tests/golden/name`` holds must be ``text``."""

    def compare(name: str, text: str) -> None:
        path = _GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; if that is meant: --update-golden"

    return compare


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


def pytest_collection_finish() -> None:
    """Leave what importing made out of every garbage collection: one of all of it takes 0.3 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture
def bits_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of ours update by plain operations: tests then compare bits with torch's."""
    from roundpipe.optim import chunks, single_pass

    monkeypatch.setattr(chunks, "FUSED", False)

    resolve = single_pass.resolve
    monkeypatch.setattr(
        single_pass,
        "resolve",
        lambda implementation: resolve("chunks" if implementation == "auto" else implementation),
    )


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
