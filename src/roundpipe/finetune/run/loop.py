"""`roundpipe train`, from config to result, in the order in which it happens.

config → folder → tokenizer → data → model → adapter          (`prepare.py`)
       → RoundPipe → checkpoint → steps and saves → result    (`steps.py`)

Whatever a user can get wrong fails before the first step, most of it before the model is loaded;
nothing of an earlier run is removed until then. What the folder alone can answer (already
finished, another config, in use) is answered before torch is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.output.earlier import RunState
from roundpipe.finetune.output.run_folder import claim
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.signals import listening

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roundpipe.finetune.run.signals import Stop
    from roundpipe.finetune.settings.config import TrainConfig


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. ``history``: the records of ``trainer_log.jsonl``."""

    folder: Path
    history: list[dict[str, Any]]

    @property
    def global_step(self) -> int:
        """Optimizer steps made."""
        return max((int(record["step"]) for record in self.history), default=0)


def train(
    config: TrainConfig,
    notes: Sequence[str] = (),
    *,
    terminal: Terminal | None = None,
    environment: Mapping[str, str] | None = None,
    stop: Stop | None = None,
) -> TrainResult | None:
    """Fine-tune as ``config`` says and write the result into ``config.output_dir``.

    ``notes`` are shown; ``environment`` is the process's, for choosing devices. ``stop``: what
    signals have asked for; None listens to them until this returns. Blocks until the result is
    saved; returns None where a finished run of the same config is there already. An unfinished one
    is gone on with.

    Raises ConfigError and PlanError before the first step; StepError when a step fails, and
    `Stopped`, a KeyboardInterrupt, when a signal came, both after a checkpoint has been saved.
    """
    terminal = terminal or Terminal()
    with contextlib.ExitStack() as parts:
        stop = stop or parts.enter_context(listening())
        folder = parts.enter_context(claim(config, terminal.counting))
        if folder.state is RunState.FINISHED:
            terminal.line(
                f"already finished: {config.output_dir} holds the result of this config; "
                "overwrite_output_dir=true trains again"
            )
            return None
        for line in (*folder.earlier.lines, *notes):
            terminal.line(line)
        with terminal.waiting("starting torch"):
            from roundpipe.finetune.run.prepare import prepare  # noqa: PLC0415
            from roundpipe.finetune.run.steps import train_job  # noqa: PLC0415
        stop.check()
        job = parts.enter_context(
            prepare(config, terminal, environment=environment, earlier=folder.earlier)
        )
        return TrainResult(folder.path, train_job(job, folder, terminal, stop))
