"""What is recorded of every step, in ``trainer_log.jsonl`` and on the terminal.

The norm of a step's gradients is known only after the step has committed; waiting for it at once
would stop the pipeline. A record therefore waits until the next step has been given, and its norm
is read then. Records are written in the order of the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from roundpipe.device.host_memory import host_memory, used_bytes
from roundpipe.errors import RoundPipeError
from roundpipe.finetune.output.progress import StepFigures

if TYPE_CHECKING:
    from roundpipe.finetune.output.progress import Progress
    from roundpipe.finetune.output.run_folder import RunFolder

_MAX_SKIPPED_IN_A_ROW = 5
_MOST_SKIPPED_SCALED = 5 + 16  # a scale begins with 2**16


class PendingStep(Protocol):
    """Of a step that may be under way: reading a field waits for its end."""

    @property
    def grad_norm(self) -> SupportsFloat | None:
        """Global norm of the step's gradients before clipping."""
        ...

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated because loss or gradients were not finite."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What the loop knows of a step when it has been given."""

    step: int
    epoch: float
    loss: float  # mean over the step's trained tokens
    learning_rate: float  # used in this step
    tokens: int  # without padding
    seconds: float  # since the step before
    busy_share: float | None = None


class StepLog:
    """Collects the steps of a run; ``history`` holds what was written.

    ``scaled``: losses are scaled, so that several steps may have to find by how much.
    """

    def __init__(
        self, folder: RunFolder, *, total_steps: int, logging_steps: int, scaled: bool = False
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self.last_step = 0  # the last that was given
        self._folder = folder
        self._total_steps = total_steps
        self._logging_steps = logging_steps
        self._most_skipped = _MOST_SKIPPED_SCALED if scaled else _MAX_SKIPPED_IN_A_ROW
        self._progress: Progress | None = None
        self._unlogged: list[StepRecord] = []
        self._pending: tuple[StepRecord, PendingStep] | None = None
        self._last_norm: float | None = None
        self._skipped_in_a_row = 0
        memory = host_memory()
        self._usable_memory = None if memory is None else memory.usable_bytes

    def show_on(self, progress: Progress) -> None:
        """Show every further step on ``progress`` too."""
        self._progress = progress

    def add(self, record: StepRecord, result: PendingStep) -> None:
        """Take a step that was just given; writes the one before it.

        Raises RoundPipeError after several steps in a row without a finite gradient.
        """
        self.settle()
        self.last_step = record.step
        self._pending = (record, result)
        self._unlogged.append(record)
        if self._progress is not None:
            self._progress.advance(self._figures(record, self._last_norm))

    def settle(self) -> None:
        """Wait for the last given step and write it; no step is pending afterwards."""
        if self._pending is None:
            return
        (record, result), self._pending = self._pending, None
        norm = result.grad_norm
        self._last_norm = None if norm is None else float(norm)
        self._count_skipped(record, result)
        is_last = record.step == self._total_steps
        if record.step % self._logging_steps == 0 or is_last:
            self._write(record, result)

    def add_evaluation(self, step: int, epoch: float, loss: float) -> None:
        """Write the loss on the evaluation data after ``step`` steps."""
        self.settle()
        self._append({"step": step, "epoch": round(epoch, 4), "eval_loss": _finite(loss)})
        self._say(f"step {step}/{self._total_steps} evaluation loss {loss:.4g}")

    def _write(self, record: StepRecord, result: PendingStep) -> None:
        steps, self._unlogged = self._unlogged, []
        mean = replace(
            record,
            loss=sum(s.loss for s in steps) / len(steps),
            tokens=sum(s.tokens for s in steps),
            seconds=sum(s.seconds for s in steps),
        )
        figures = self._figures(mean, self._last_norm)
        self._append(
            {
                "step": record.step,
                "total_steps": self._total_steps,
                "epoch": round(record.epoch, 4),
                "loss": _finite(mean.loss),
                "grad_norm": _finite(self._last_norm),
                "learning_rate": record.learning_rate,
                "tokens_per_second": round(figures.tokens_per_second or 0.0, 1),
                "seconds": round(mean.seconds, 3),
            }
            | ({"skipped": True} if result.skipped else {})
        )
        if self._progress is not None:
            self._progress.record(figures)

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.say(text)

    def _append(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        self._folder.append_log(record)

    def _count_skipped(self, record: StepRecord, result: PendingStep) -> None:
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self._say(f"step {record.step} changed nothing: its loss or gradient is not finite")
        if self._skipped_in_a_row >= self._most_skipped:
            raise RoundPipeError(
                f"no finite gradient for {self._skipped_in_a_row} steps, the last of them: "
                f"{record.step}\nhint: learning_rate={record.learning_rate / 10:.0e}, "
                "or dtype=fp32; the weights are those of the last good step"
            )

    def _figures(self, record: StepRecord, norm: float | None) -> StepFigures:
        return StepFigures(
            step=record.step,
            loss=record.loss,
            learning_rate=record.learning_rate,
            grad_norm=norm,
            tokens_per_second=record.tokens / record.seconds if record.seconds > 0 else None,
            busy_share=record.busy_share,
            memory=self._memory(),
        )

    def _memory(self) -> tuple[int, int] | None:
        used = used_bytes()
        if used is None or self._usable_memory is None:
            return None
        return used, self._usable_memory


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
