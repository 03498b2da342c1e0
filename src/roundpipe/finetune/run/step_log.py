"""What is recorded of every step, in ``trainer_log.jsonl`` and on the terminal.

The norm of a step's gradients is known only after the step has committed; waiting for it at once
would stop the pipeline. A record therefore waits until the next step has been given, and its norm
is read then. Records are written in the order of the steps.

What a record says is the same for a run that was stopped and gone on with, but for `TIMES`: what
the run took of the machine.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from roundpipe.device.host_memory import host_memory, used_bytes
from roundpipe.device.used import peak_used_bytes
from roundpipe.errors import RoundPipeError
from roundpipe.finetune.output.counting import Counting
from roundpipe.finetune.output.progress import StepFigures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.device.api import Device
    from roundpipe.finetune.output.progress import Progress
    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.run.loggers import Loggers

TIMES = frozenset(
    {"seconds", "tokens_per_second", "busy_share", "host_memory", "device_memory"}
    | {"eval_seconds"}
)
_PATIENCE_SECONDS = 2.0  # an evaluation that takes longer says how far it is
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
    trained_tokens: int = 0  # that the loss is a mean over
    seconds: float  # since the step before
    busy_share: float | None = None


@dataclass
class _Totals:
    """What has come together over all steps that ended, resumed ones too."""

    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0


class StepLog:
    """Collects the steps of a run; ``history`` holds what was written.

    ``logging_steps`` None: somebody else says when, by `take` and `append`. ``scaled``: losses are
    scaled, so that several steps may have to find by how much. ``loggers`` are given every record
    too. ``devices``: whose memory is told.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_steps: int,
        logging_steps: int | None,
        scaled: bool = False,
        loggers: Loggers | None = None,
        devices: Sequence[Device] = (),
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self._folder = folder
        self._total_steps = total_steps
        self._logging_steps = logging_steps
        self._most_skipped = _MOST_SKIPPED_SCALED if scaled else _MAX_SKIPPED_IN_A_ROW
        self._loggers, self._devices = loggers, devices
        self._progress: Progress | None = None
        self._totals = _Totals()
        self._unlogged: list[StepRecord] = []
        self._unwritten: list[dict[str, Any]] = []  # of the log's file, where the disk is full
        self._pending: tuple[StepRecord, PendingStep] | None = None
        self._last_norm: float | None = None
        memory = host_memory()
        self._usable_memory = None if memory is None else memory.usable_bytes

    def text(self, name: str, text: str) -> None:
        """Hand a text to the loggers."""
        if self._loggers is not None:
            self._loggers.text(name, text)

    def show_on(self, progress: Progress) -> None:
        """Show every further step on ``progress`` too."""
        self._progress = progress

    @property
    def num_skipped(self) -> int:
        """Steps so far that changed nothing, because their gradient was not finite."""
        return self._totals.num_skipped

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps that ended, without padding."""
        return self._totals.num_tokens

    @property
    def last_norm(self) -> float | None:
        """Of the last step that ended: the global norm of its gradients before clipping."""
        return self._last_norm

    def add(self, record: StepRecord, result: PendingStep) -> None:
        """Take a step that was just given; writes the one before it.

        Raises RoundPipeError after several steps in a row without a finite gradient.
        """
        self.settle()
        self._pending = (record, result)
        if self._progress is not None:
            self._progress.advance(self._figures(record, self._last_norm))

    def settle(self) -> None:
        """Wait for the last given step and write it; no step is pending afterwards.

        Raises what made that step fail, which then was none.
        """
        if self._pending is None:
            return
        (record, result), self._pending = self._pending, None
        norm = result.grad_norm
        self._last_norm = None if norm is None else float(norm)
        self._unlogged.append(record)
        self._totals.num_tokens += record.tokens
        self._totals.num_trained_tokens += record.trained_tokens
        problem = self._count_skipped(record, result)
        if self._is_due(record.step):
            self._write()
        if problem is not None:
            raise RoundPipeError(problem)

    def _is_due(self, step: int) -> bool:
        every = self._logging_steps
        return every is not None and (step % every == 0 or step == self._total_steps)

    def forget(self, step: int) -> None:
        """Step ``step`` and those after it have failed, and are given again; they have no record.

        Steps before it are settled, or have to be.
        """
        if self._pending is not None and self._pending[0].step >= step:
            self._pending = None

    def add_evaluation(
        self,
        step: int,
        epoch: float,
        loss: float,
        *,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write the loss on the evaluation data after ``step`` steps."""
        self.settle()
        record: dict[str, Any] = {
            "step": step,
            "epoch": round(epoch, 4),
            "eval_loss": _finite(loss),
        }
        if tokens is not None:
            record["eval_tokens"] = tokens
        if seconds is not None:
            record["eval_seconds"] = round(seconds, 3)
        self.append(record)
        self.say(f"step {step}/{self._total_steps} evaluation loss {loss:.4g}")

    # ---- to a checkpoint and back

    def state(self) -> dict[str, Any]:
        """What a resumed log needs besides `history`, as JSON values. No step may be pending."""
        assert self._pending is None, "settle first"
        unlogged = [{**asdict(record), "loss": _finite(record.loss)} for record in self._unlogged]
        norm = _finite(self._last_norm)
        return {**asdict(self._totals), "last_norm": norm, "unlogged": unlogged}

    def restore(self, state: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        """Go on where the log that gave this `state` and `history` was; writes no file."""
        self.history[:] = [dict(record) for record in history]
        names = asdict(self._totals)
        self._totals = _Totals(**{name: int(state.get(name, 0)) for name in names})
        self._last_norm = state.get("last_norm")
        self._unlogged = [
            StepRecord(**{**given, "loss": math.nan if given["loss"] is None else given["loss"]})
            for given in state.get("unlogged", ())
        ]

    # ---- records

    def finish(self) -> None:
        """Write the steps since the last record, where a run ends before the next is due."""
        self.settle()
        if self._unlogged and self._logging_steps is not None:
            self._write()

    def take(self) -> StepRecord | None:
        """The steps since the last record as one, their mean loss; None where there are none."""
        steps, self._unlogged = self._unlogged, []
        if not steps:
            return None
        return replace(
            steps[-1],
            loss=sum(s.loss for s in steps) / len(steps),
            tokens=sum(s.tokens for s in steps),
            seconds=sum(s.seconds for s in steps),
        )

    def show(self, record: StepRecord) -> None:
        """Show what `take` gave where progress is shown, and in ``run.log``."""
        if self._progress is not None:
            self._progress.record(self._figures(record, self._last_norm))

    def _write(self) -> None:
        mean = self.take()
        assert mean is not None, "nothing to write"
        figures = self._figures(mean, self._last_norm)
        self.append(
            {
                "step": mean.step,
                "total_steps": self._total_steps,
                "epoch": round(mean.epoch, 4),
                "loss": _finite(mean.loss),
                "grad_norm": _finite(self._last_norm),
                "learning_rate": mean.learning_rate,
                "num_tokens": self._totals.num_tokens,
                "num_trained_tokens": self._totals.num_trained_tokens,
                "tokens_per_second": round(figures.tokens_per_second or 0.0, 1),
                "seconds": round(mean.seconds, 3),
            }
            | self._machine(figures)
            | ({"skipped": True} if self._totals.skipped_in_a_row else {})
            | ({"num_skipped": self.num_skipped} if self.num_skipped else {})
        )
        self.show(mean)

    def _machine(self, figures: StepFigures) -> dict[str, Any]:
        """What the run takes of the machine; bytes."""
        found: dict[str, Any] = {}
        if figures.busy_share is not None:
            found["busy_share"] = round(figures.busy_share, 4)
        if figures.memory is not None:
            found["host_memory"] = figures.memory[0]
        if self._devices:
            found["device_memory"] = max(map(peak_used_bytes, self._devices))
        return found

    def say(self, text: str) -> None:
        """Show a line among the steps, and log it."""
        if self._progress is not None:
            self._progress.say(text)

    def evaluating(self, num_samples: int) -> Counting:
        """What an evaluation tells how many of its samples are done; a line now and then."""
        return Counting(
            "evaluating",
            num_samples,
            "samples",
            write=self.say,
            is_tty=False,
            patience=_PATIENCE_SECONDS,
        )

    def append(self, record: dict[str, Any]) -> None:
        """Keep a record, and write it as soon as the disk takes it."""
        self.history.append(record)
        if self._loggers is not None:
            self._loggers.log(record["step"], record)
        self._unwritten.append(record)
        is_first = len(self._unwritten) == 1
        try:
            while self._unwritten:
                self._folder.append_log(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            if is_first:
                self.say(f"the log cannot be written for now: {error}")

    def _count_skipped(self, record: StepRecord, result: PendingStep) -> str | None:
        """Count a step that changed nothing; what to end the run with, if they are too many."""
        totals = self._totals
        if not result.skipped:
            totals.skipped_in_a_row = 0
            return None
        totals.skipped_in_a_row += 1
        totals.num_skipped += 1
        self.say(f"step {record.step} changed nothing: its loss or gradient is not finite")
        if totals.skipped_in_a_row < self._most_skipped:
            return None
        return (
            f"no finite gradient for {totals.skipped_in_a_row} steps, the last of them: "
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
