"""Checkpoints of a run: one at a time, written while training goes on.

A periodic save that fails is told loudly and the run goes on: the checkpoint before it is intact.
Old ones are dropped only when a newer one is on the disk, and never the best one where that is to
become the result.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING, Any

from roundpipe.checkpoint.find import checkpoints_in, drop_old
from roundpipe.finetune.output.earlier import CONFIG_FILE, STATE_FILE
from roundpipe.finetune.output.result_files import save_tokenizer
from roundpipe.finetune.output.run_folder import config_text

if TYPE_CHECKING:
    from pathlib import Path

    from roundpipe.checkpoint.saved import SavedCheckpoint
    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.due import Due
    from roundpipe.finetune.run.training import Training

logger = logging.getLogger(__name__)


class Saver:
    """Saves ``training`` into ``folder``; ``last``: the step of the newest checkpoint there is.

    ``is_over``: the weights are no longer those of the last step, so nothing is saved any more.
    """

    def __init__(self, training: Training, folder: RunFolder, due: Due, terminal: Terminal) -> None:
        self.due = due
        self._training, self._folder = training, folder
        self._terminal = terminal
        self.last = training.done if self._is_here(folder.earlier.checkpoint) else 0
        self.is_over = False
        self._best = self._next_best = training.best.step  # on the disk; and to be there next
        self._under_way: tuple[int, SavedCheckpoint] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint after the steps done is due, or was asked for by ``save-now``."""
        self._collect()
        return self.due.is_saving_due(self._training.done) or self._folder.is_saving_asked()

    def save_if_due(self, *, is_better: bool, is_last: bool) -> None:
        """Begin a checkpoint after the steps done, if one is due; no step may be pending.

        ``is_better``: these weights are the best so far. ``is_last``: no step follows; what is
        saved then lets a finished run go on for more epochs.
        """
        config, step = self._training.job.config, self._training.done
        is_asked = self._folder.is_saving_asked()
        wants_best = config.load_best_model_at_end or config.save_strategy == "best"
        is_best = is_better and wants_best
        wants_last = is_last and config.save_strategy not in ("no", "best")
        if self.due.is_saving_due(step) or is_asked or is_best or wants_last:
            self.save(is_best=is_best)
        if is_asked:
            self._folder.saving_done()

    def save(self, *, is_best: bool = False) -> None:
        """Begin a checkpoint after the steps done, if there is none; no step may be pending.

        ``is_best``: these weights are the best so far, and may become the result.
        """
        config, step = self._training.job.config, self._training.done
        # The best is loaded at the end, which takes a whole checkpoint.
        keeps_state = is_best and config.load_best_model_at_end
        if is_best:
            self.wait()  # the best until now stays until this one is on the disk
            self._next_best = step
            self._best = step if step == self.last else self._best
        self._begin(step, only_model=config.save_only_model and not keeps_state)

    def save_to_go_on(self) -> str | None:
        """Have a checkpoint of the steps done that a run can go on from; its name, or None at 0.

        Blocks until it is on the disk. Raises what kept it from being saved.
        """
        self._training.settle()
        self.wait()
        step = self._training.done
        if step == 0:
            return None
        if self.is_over:
            return self._shown(self.last) if self.last else None
        if self.last != step or self._training.job.config.save_only_model:
            self._save(step, only_model=False, is_async=False)
            self._done(step)
        return self._shown(step)

    def wait(self) -> None:
        """Wait for the save under way, if any; one that failed is told."""
        self._collect(wait=True)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after ``step`` steps."""
        return self._folder.path / f"checkpoint-{step}"

    def best_path(self, step: int) -> Path:
        """The same of an evaluation, which may have been before a run of another folder ended."""
        earlier = self._folder.earlier
        began = earlier.checkpoint
        if began is None or self._is_here(began) or step > earlier.step:
            return self.path(step)
        return began.with_name(self.path(step).name)

    def _is_here(self, checkpoint: Path | None) -> bool:
        """Whether what a run goes on from is one of its own folder: others may be anywhere."""
        return checkpoint is not None and checkpoint.resolve().parent == self._folder.path.resolve()

    def _begin(self, step: int, *, only_model: bool) -> None:
        if step in (self.last, 0):
            return
        self.wait()
        try:
            handle = self._save(step, only_model=only_model, is_async=True)
        except Exception as error:  # whatever a library has against it
            self._failed(step, error)
        else:
            self._under_way = (step, handle)

    def _save(self, step: int, *, only_model: bool, is_async: bool) -> SavedCheckpoint:
        training = self._training
        handle: SavedCheckpoint = training.pipe.save_checkpoint(
            self.path(step),
            training.optimizer,
            training.scheduler,
            is_async=is_async,
            only_model=only_model,
            beside=functools.partial(_write_beside, *self._beside()),
            about=self._about(step, only_model=only_model),
            **training.state(),
        )
        if not is_async:
            handle.wait()
        return handle

    def _beside(self) -> tuple[Any, dict[str, Any], str]:
        """What lies beside the weights; as it is now, for it may be written later."""
        training = self._training
        state = training.events.trainer_state()
        return training.job.tokenizer, state, config_text(training.job.config)

    def _about(self, step: int, *, only_model: bool) -> dict[str, Any]:
        job = self._training.job
        return {**job.content, "step": step, "only_model": only_model}

    def _collect(self, *, wait: bool = False) -> None:
        """Take note of a save that is over."""
        if self._under_way is None or not (wait or self._under_way[1].is_done):
            return
        (step, handle), self._under_way = self._under_way, None
        try:
            handle.wait()
        except Exception as error:
            self._failed(step, error)
        else:
            self._done(step)
            self._terminal.line(f"saved {self._shown(step)}")

    def _done(self, step: int) -> None:
        self.last = step
        self.due.saved()
        config = self._training.job.config
        if step == self._next_best:
            self._best = step
        best = self._best
        never = [self.path(best)] if config.load_best_model_at_end and best is not None else []
        if config.save_total_limit is None:
            return
        try:
            drop_old(self._folder.path, config.save_total_limit, never, up_to=step)
        except OSError as error:
            self._terminal.line(f"old checkpoints could not be removed: {error}")

    def _failed(self, step: int, error: Exception) -> None:
        self.due.saved()  # the next attempt comes in its own time
        kept = [path.name for path in checkpoints_in(self._folder.path)]
        newest = f"the newest is {self._folder.shown}/{kept[-1]}" if kept else "there is none yet"
        problem = str(error).replace("\nhint:", ";")
        self._terminal.line(
            f"warning: {self._shown(step)} could not be saved: {problem} "
            f"({newest}; training goes on)"
        )
        logger.debug("saving", exc_info=error)

    def _shown(self, step: int) -> str:
        return f"{self._folder.shown}/{self.path(step).name}"


def trainer_state(training: Training) -> dict[str, Any]:
    """``trainer_state.json`` after the steps done, with the names that transformers gives them."""
    order, best = training.order, training.best
    return {
        "global_step": training.done,
        "max_steps": order.total_steps,
        "epoch": round(order.epoch(training.done), 4),
        "best_metric": best.loss,
        "best_global_step": best.step,
        "log_history": list(training.log.history),
    }


def _write_beside(tokenizer: Any, state: dict[str, Any], config: str, folder: Path) -> None:
    """Write what makes a checkpoint load like a result, and what tells how far it was."""
    save_tokenizer(tokenizer, folder)
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
