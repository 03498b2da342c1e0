import io
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roundpipe.finetune.output.progress import (
    BarProgress,
    NotebookProgress,
    PlainProgress,
    StepFigures,
    clock,
    short_number,
)
from roundpipe.finetune.output.terminal import Terminal

FIGURES = StepFigures(
    step=24,
    loss=1.8412,
    learning_rate=8e-5,
    grad_norm=0.912,
    tokens_per_second=1412.3,
    busy_share=0.97,
    memory=(2_100_000_000, 24_000_000_000),
)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_reads_like_one_line() -> None:
    assert str(FIGURES) == (
        "loss 1.841 lr 8.0e-5 norm 0.912 · 1,412 tok/s · busy 97 % · ram 2.1/24 GB"
    )
    assert str(StepFigures(step=1, loss=2.0, learning_rate=0.0)) == "loss 2 lr 0"


def test_plain_places_get_one_line_a_recorded_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    with terminal.progress(24) as progress, terminal.logging_to(tmp_path / "run.log"):
        assert isinstance(progress, PlainProgress)
        progress.advance(FIGURES)
        assert stream.getvalue() == ""
        progress.record(FIGURES)
    assert stream.getvalue() == f"step 24/24 {FIGURES}\n"
    assert (tmp_path / "run.log").read_text() == stream.getvalue()


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    stream = Tty()
    terminal = Terminal(stream)
    with terminal.progress(40) as progress:
        assert isinstance(progress, BarProgress)
        progress.advance(FIGURES)
        terminal.line("a line [bold]as it is[/bold]")
    assert "step 24/40" in stream.getvalue()
    assert "a line [bold]as it is[/bold]" in stream.getvalue()


@pytest.mark.parametrize("width", [200, 74, 61, 40, 5])
def test_what_does_not_fit_is_left_out_from_the_least_important_on(width: int) -> None:
    text = str(FIGURES.fitting(width))
    assert text.startswith("loss 1.841 lr 8.0e-5")
    assert len(text) <= max(width, len("loss 1.841 lr 8.0e-5"))
    assert ("ram" in text) == (width >= len(str(FIGURES)))
    assert ("tok/s" in text) == (width >= len("loss 1.841 lr 8.0e-5 norm 0.912 · 1,412 tok/s"))


def test_a_notebook_gets_one_line_that_is_rewritten_without_widgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append("again " + data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})()
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with Terminal(io.StringIO()).progress(48) as progress:
        assert isinstance(progress, NotebookProgress)
        progress.advance(FIGURES)
        progress.advance(FIGURES)
    assert shown[0].startswith("step 24/48 ━━━━━━━━━━──────────")
    assert shown[1].startswith("again step 24/48")


def test_lines_from_before_the_log_was_opened_are_in_it_too(tmp_path: Path) -> None:
    terminal = Terminal(io.StringIO())
    terminal.line("before")
    with terminal.logging_to(tmp_path / "run.log"):
        terminal.line("during")
        assert (tmp_path / "run.log").read_text() == "before\nduring\n"


def test_what_takes_long_gets_a_line_at_once_and_its_time_at_the_end() -> None:
    stream = io.StringIO()
    written = threading.Event()
    write = stream.write
    stream.write = lambda text: (write(text), written.set())[0]  # type: ignore[method-assign]
    with Terminal(stream, patience=0.01).waiting("loading"):
        assert written.wait(10)
        assert stream.getvalue() == "loading …\n"
    assert stream.getvalue().splitlines()[1].startswith("loading: ")


def test_what_is_quick_gets_no_line() -> None:
    stream = io.StringIO()
    with Terminal(stream, patience=60).waiting("loading"):
        pass
    assert stream.getvalue() == ""
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]


def test_a_terminal_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for stream in (Gone(), _closed()):
        terminal = Terminal(stream)
        with terminal.logging_to(tmp_path / "run.log"), terminal.progress(24) as progress:
            terminal.line("lost on the screen")
            progress.advance(FIGURES)
            progress.record(FIGURES)
    assert (tmp_path / "run.log").read_text().count("lost on the screen\n") == 2


def test_a_bar_on_a_terminal_that_is_closed_meanwhile_stops_nothing(tmp_path: Path) -> None:
    class Closing(Tty):
        is_gone = False

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(5, "input/output error")
            return super().write(text)

        def flush(self) -> None:
            if self.is_gone:
                raise OSError(5, "input/output error")

    stream, failed = Closing(), []
    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        terminal = Terminal(stream, patience=0.0)
        with terminal.logging_to(tmp_path / "run.log"), terminal.progress(24) as progress:
            assert isinstance(progress, BarProgress)
            stream.is_gone = True
            progress.advance(FIGURES)
            progress._bar.refresh()  # as its own thread does
            terminal.line("lost on the screen")
            with terminal.counting("loading", 9) as show:
                show(3)
        assert "lost on the screen\n" in (tmp_path / "run.log").read_text()
        assert not failed
    finally:
        threading.excepthook = hook


@pytest.mark.parametrize("stream", [io.StringIO(), Tty()])
def test_a_run_that_goes_on_begins_at_its_step_and_counts_its_own_time_only(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Terminal(stream).progress(40, done=20) as progress, monkeypatch.context() as patch:
        now = progress._started + 10.0
        patch.setattr("roundpipe.finetune.output.progress.time.perf_counter", lambda: now)
        assert progress.time_left(22) == " · 1:30 left"
        assert progress.time_left(40) == ""
    if isinstance(stream, Tty):
        assert "step 20/40" in stream.getvalue()


def test_a_log_that_the_disk_does_not_take_stops_nothing(tmp_path: Path) -> None:
    terminal = Terminal(io.StringIO())
    with terminal.logging_to(Path("/dev/full") if Path("/dev/full").exists() else tmp_path / "a"):
        terminal.line("shown all the same")
    with terminal.logging_to(tmp_path):  # a folder
        terminal.line("also shown")
    shown = terminal._stream.getvalue()  # type: ignore[attr-defined]
    assert "shown all the same" in shown
    assert "cannot be written: " in shown
    assert shown.endswith("also shown\n")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_terminal_of_another_alphabet_shows_what_it_can() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(stream).line("▌4 · 5▐")
    assert raw.getvalue() == b"?4 ? 5?\n"


def test_answers_stand_together_before_and_after() -> None:
    stream = io.StringIO()
    Terminal(stream).answers(["how\nmany?"], ["well,\nlet us see"], ["12"])
    assert stream.getvalue().splitlines() == [
        "prompt: how many?",
        "  before: well, let us see",
        "  after:  12",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (38.4, "0:38"), (61, "1:01"), (3723, "1:02:03")]
)
def test_time_left_reads_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_time_left_is_the_mean_of_the_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with Terminal(io.StringIO()).progress(10) as progress:
        now[0] += 20
        assert progress.time_left(4) == " · 0:30 left"
        assert progress.time_left(10) == ""


def test_small_numbers_have_short_exponents() -> None:
    assert [short_number(v) for v in (8e-5, 2e-4, 1.0, 1e-10, 0)] == [
        "8.0e-5",
        "2.0e-4",
        "1.0e+0",
        "1.0e-10",
        "0",
    ]
