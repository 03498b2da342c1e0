"""The one line that tells how far training is, in the three places it can be shown.

A step's gradient norm is known only after the step has committed, and asking earlier would stop
the pipeline. So a step is told twice: ``advance`` at once, with its loss, and ``record`` a step
later, with everything. A bar moves on the first, a plain line is written on the second.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_LEAST_BAR = 12  # characters left for the bar itself, with its margins


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What is shown of one step. ``None``: not known (yet), not shown."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    busy_share: float | None = None
    memory: tuple[int, int] | None = None  # bytes used, usable

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4g} lr {short_number(self.learning_rate)}"]
        if self.grad_norm is not None:
            parts[0] += f" norm {self.grad_norm:.3g}"
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tok/s")
        if self.busy_share is not None:
            parts.append(f"busy {self.busy_share * 100:.0f} %")
        if self.memory is not None:
            used, usable = self.memory
            parts.append(f"ram {used / 1e9:.1f}/{usable / 1e9:.0f} GB")
        return " · ".join(parts)

    def fitting(self, width: int) -> StepFigures:
        """As much of it as fits into ``width`` characters; the loss is always shown."""
        shown: StepFigures = self
        for name in ("memory", "busy_share", "tokens_per_second", "grad_norm"):
            if len(str(shown)) <= width:
                break
            nothing: dict[str, Any] = {name: None}
            shown = replace(shown, **nothing)
        return shown


class Progress:
    """Base of the three places; counts steps and knows the time left."""

    def __init__(
        self, total_steps: int, *, log: Callable[[str], None], write: Callable[[str], None]
    ) -> None:
        self.total_steps = total_steps
        self._log = log
        self._write = write
        self._first_step = 0  # of an earlier run, which took other time
        self._started = time.perf_counter()

    def begin_at(self, step: int) -> None:
        """Go on after ``step`` steps that an earlier run has made."""
        self._first_step = step

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def advance(self, figures: StepFigures) -> None:
        """Step ``figures.step`` is done; its norm may not be known yet."""

    def record(self, figures: StepFigures) -> None:
        """Everything about a step that is to be logged is known."""
        self._log(self.text(figures))

    def write_above(self, text: str) -> None:
        """Write a line that stays."""
        self._write(text)

    def say(self, text: str) -> None:
        """Write a line that stays, and log it."""
        self._write(text)
        self._log(text)

    def text(self, figures: StepFigures) -> str:
        """The line for one step, as it is logged."""
        return f"step {figures.step}/{self.total_steps} {figures}{self.time_left(figures.step)}"

    def time_left(self, step: int) -> str:
        """`` · 0:38 left``, from the mean of all steps of this run; empty at the end."""
        if step >= self.total_steps:
            return ""
        per_step = (time.perf_counter() - self._started) / max(step - self._first_step, 1)
        return f" · {clock(per_step * (self.total_steps - step))} left"


class PlainProgress(Progress):
    """A line for each recorded step: for pipes and files."""

    def record(self, figures: StepFigures) -> None:
        """Write and log the step's line."""
        text = self.text(figures)
        self._write(text)
        self._log(text)


class NotebookProgress(Progress):
    """One line of a notebook cell that is rewritten in place; needs no widgets."""

    def __init__(
        self, total_steps: int, *, log: Callable[[str], None], write: Callable[[str], None]
    ) -> None:
        super().__init__(total_steps, log=log, write=write)
        self._handle: Any = None

    def advance(self, figures: StepFigures) -> None:
        """Rewrite the line."""
        from IPython.display import (  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
            display,
        )

        done = 20 * figures.step // self.total_steps
        bar = "━" * done + "─" * (20 - done)
        line = {
            "text/plain": f"step {figures.step}/{self.total_steps} {bar} {figures}"
            f"{self.time_left(figures.step)}"
        }
        if self._handle is None:
            self._handle = display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)


class BarProgress(Progress):
    """A bar at the bottom of a terminal; lines scroll above it."""

    def __init__(self, total_steps: int, *, log: Callable[[str], None], stream: TextIO) -> None:
        from rich import progress  # noqa: PLC0415, costs 0.1 s where no bar is drawn
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415

        self._console = Console(file=_NeverRaising(stream), highlight=False, markup=False)  # type: ignore[arg-type]
        super().__init__(total_steps, log=log, write=self._print)
        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}", markup=False),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
            progress.TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps, figures="")

    def begin_at(self, step: int) -> None:
        """Start the bar there."""
        super().begin_at(step)
        self._bar.update(self._task, completed=step)

    def __enter__(self) -> Self:
        super().__enter__()
        with contextlib.suppress(OSError):
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def advance(self, figures: StepFigures) -> None:
        """Move the bar."""
        left = self.time_left(figures.step)
        taken = len(f"step {figures.step}/{self.total_steps} ") + _LEAST_BAR + len(left)
        text = f"{figures.fitting(self._console.width - taken)}{left}"
        with contextlib.suppress(OSError):
            self._bar.update(self._task, completed=figures.step, figures=text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, soft_wrap=True)


class _NeverRaising:
    """A terminal that may be gone. The bar is drawn by a thread of its own, too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # another alphabet
            encoding = self._stream.encoding or "ascii"
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def clock(seconds: float) -> str:
    """``0:38``, ``1:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def short_number(value: float) -> str:
    """``8.0e-5``: the exponent without leading zeros."""
    if value == 0:
        return "0"
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", f"{value:.1e}")
