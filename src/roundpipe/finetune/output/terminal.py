"""What a person sees of a run: lines, waiting, and one line of progress.

Three kinds of places show it: a terminal (a bar that moves), a notebook (a line that is rewritten)
and everything else (plain lines). Whatever is shown is also written to ``run.log``, which is opened
only when the run really starts; lines from before wait for it.

Rule: a place that is gone (a closed terminal, a pipe whose reader ended) never stops a run.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from roundpipe.finetune.output.answers import LEAST_WIDTH, in_columns, stacked
from roundpipe.finetune.output.characters import put
from roundpipe.finetune.output.counting import Counting
from roundpipe.finetune.output.progress import (
    BarProgress,
    NotebookProgress,
    PlainProgress,
    Progress,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_ERASE_LINE = "\r\x1b[K"


class Terminal:
    """Shows the lines of one run on ``stream`` and keeps them for ``run.log``.

    ``patience``: seconds after which something that is waited for gets a line of its own.
    """

    def __init__(self, stream: TextIO | None = None, *, patience: float = 2.0) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._patience = patience
        self._lock = threading.RLock()
        self._unlogged: list[str] = []
        self._log: TextIO | None = None
        self._write_above: Callable[[str], None] | None = None

    def line(self, text: str = "") -> None:
        """Show one line, above the progress bar where there is one, and log it."""
        with self._lock:
            (self._write_above or self._write_line)(text)
            self.log(text)

    def log(self, text: str) -> None:
        """Write one line to ``run.log`` without showing it."""
        with self._lock:
            if self._log is None:
                self._unlogged.append(text)
            else:
                with contextlib.suppress(OSError):  # a full disk stops no run here
                    self._log.write(text + "\n")
                    self._log.flush()

    @contextlib.contextmanager
    def logging_to(self, path: Path) -> Iterator[None]:
        """Write all lines, also those shown so far, to ``path`` while the block runs.

        Where the disk does not take it, that is said and no line is written.
        """
        try:
            file = path.open("a", encoding="utf-8")
        except OSError as error:
            self.line(f"{path.name} cannot be written: {error.strerror or error}")
            yield
            return
        with self._lock:
            self._log, waiting = file, self._unlogged
            self._unlogged = []
        for text in waiting:
            self.log(text)
        try:
            yield
        finally:
            with self._lock:
                self._log = None
            with contextlib.suppress(OSError):  # see `log`
                file.close()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is waited for if the block takes long, and in the end how long it took."""
        started = time.perf_counter()
        timer = threading.Timer(self._patience, self._show_waiting, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            seconds = time.perf_counter() - started
            if seconds >= self._patience:
                if self._is_tty() and self._write_above is None:
                    self._write(_ERASE_LINE)
                self.line(f"{what}: {seconds:.1f} s")

    @contextlib.contextmanager
    def counting(self, what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
        """`waiting` for something that is counted: the block calls what it is given with the count.

        ``total``: of all, in ``unit`` ("B", or the plural of what is counted). From ``patience`` on
        a terminal shows a line that is rewritten, with the time left; elsewhere a line now and
        then. Callable from any thread.
        """
        is_tty = self._is_tty() and self._write_above is None
        show = Counting(
            what,
            total,
            unit,
            write=self._rewrite if is_tty else self.line,
            is_tty=is_tty,
            patience=self._patience,
        )
        with self.waiting(what):
            yield show

    def answers(
        self,
        prompts: Sequence[str],
        before: Sequence[str],
        after: Sequence[str],
        *,
        names: tuple[str, str] = ("before", "after"),
    ) -> None:
        """Show what the model answered before and after training, side by side.

        ``names``: of the two, where they are others.
        """
        width = self._width()
        for prompt, old, new in zip(prompts, before, after, strict=True):
            lines = stacked(prompt, old, new, names=names)
            shown = lines
            if width >= LEAST_WIDTH:
                shown = in_columns(prompt, old, new, width=width, names=names)
            with self._lock:
                for text in shown:
                    (self._write_above or self._write_line)(text)
                for text in lines:
                    self.log(text)

    @contextlib.contextmanager
    def progress(self, total_steps: int, *, done: int = 0) -> Iterator[Progress]:
        """Show the progress of ``total_steps`` steps while the block runs.

        ``done``: steps of an earlier run that this one goes on from.
        """
        progress = self._make_progress(total_steps)
        progress.begin_at(done)
        with progress:
            self._write_above = progress.write_above
            try:
                yield progress
            finally:
                self._write_above = None

    def _make_progress(self, total_steps: int) -> Progress:
        if self._is_tty():
            return BarProgress(total_steps, log=self.log, stream=self._stream)
        if in_notebook():
            return NotebookProgress(total_steps, log=self.log, write=self._write_line)
        return PlainProgress(total_steps, log=self.log, write=self._write_line)

    def _rewrite(self, text: str) -> None:
        self._write(f"{_ERASE_LINE}{text}")

    def _show_waiting(self, what: str) -> None:
        if self._is_tty() and self._write_above is None:  # a bar has the last line
            self._rewrite(f"{what} …")
        else:
            self.line(f"{what} …")

    def _is_tty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def _width(self) -> int:
        """Columns of the terminal; 0 where there is none."""
        return shutil.get_terminal_size().columns if self._is_tty() else 0

    def _write_line(self, text: str) -> None:
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            put(self._stream, text)


def in_notebook() -> bool:
    """Whether a notebook's kernel runs us; an IPython shell in a terminal is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
