"""A small simulated chain to draw, and a real browser to draw it in."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.actions import COMPUTE, Action
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.timeline import Timeline
from roundpipe.report.timeline_record import TimelineRecord
from roundpipe.sim.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE = 60.0  # seconds; a machine under load starts a browser slowly


@pytest.fixture(scope="session")
def record_of() -> Callable[..., TimelineRecord]:
    """Simulate a chain of steps, every kind of action in it, and count some memory beside it."""

    def make(
        *, devices: int = 2, microbatches: int = 3, steps: int = 2, title: str = "a model"
    ) -> TimelineRecord:
        layer = LayerCost(
            forward_seconds=0.01,
            backward_seconds=0.02,
            weight_bytes=1 << 26,
            gradient_bytes=1 << 27,
        )
        costs = Costs((layer,) * 6, frozenset(range(6)))
        partition = Partition((range(3), range(3, 5)), range(5, 6), (range(2, 5), range(2)))
        computation = round_robin(partition, costs, devices=devices, microbatches=microbatches)
        chain = lower_chain(computation, Options(costs=costs), steps=steps)

        def seconds(action: Action) -> float:
            return 0.02 if action.op in COMPUTE else 0.003

        spans = simulate(chain, seconds)
        timeline = Timeline.of(
            chain,
            spans,
            devices=["a card"] * devices,
            layers=[f"block {i}" for i in range(6)],
            first_step=4,
        )
        end = max(span.end for span in spans)
        counters = {
            "0.memory": [(end * at / 8, 1e9 * (1 + at % 3)) for at in range(8)],
            "host.memory": [(0.0, 5e9), (end / 2, 6e9)],
        }
        return TimelineRecord(title, timeline, counters)

    return make


def _pipe() -> tuple[int, int]:
    """Ends to read from and to write to, whose numbers are out of the way of 3 and 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """Chromium without a window, spoken to over two pipes in its own protocol (CDP)."""

    def __init__(self, program: str, profile: str) -> None:
        self._ours_in, theirs_out = _pipe()
        theirs_in, self._ours_out = _pipe()
        command = [
            *(program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
        ]
        self._process = subprocess.Popen(  # the browser wants its ends of the pipes as 3 and 4
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._count = 0
        self.complaints: list[str] = []  # exceptions, console messages, broken policies
        self._loaded = False
        self._session: str | None = None

    def start(self) -> None:
        """Make a page and listen to it."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._ours_out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of a size; returns when it has loaded and drawn."""
        self.complaints.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.send("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        self.frame()

    def frame(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.evaluate("new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move the mouse, press or let go, or turn its wheel, at a place of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.close(self._ours_out)  # the browser ends when nobody speaks to it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._ours_in)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._ours_in], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            more = os.read(self._ours_in, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        first, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(json.dumps(message["params"]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; skips, with the reason, where none is installed."""
    program = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"needs a browser, one of: {', '.join(_BROWSERS)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = Browser(program, profile)
        try:
            try:
                running.start()
            except (AssertionError, OSError) as error:
                pytest.skip(f"needs a browser that starts: {program}: {error}")
            yield running
        finally:
            running.close()
