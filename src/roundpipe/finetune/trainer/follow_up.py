"""What follows a step or an epoch because callbacks want it: a record, an evaluation, a checkpoint.

A record of a step has the norm of its gradients, which is known when the step has committed; so a
step that is logged, evaluated or saved after is waited for.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import SaveStrategy

from roundpipe.finetune.trainer.callback_handler import is_watched, tell
from roundpipe.finetune.trainer.standing import metrics_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.run.steps import Run
    from roundpipe.finetune.trainer.standing import Standing
    from roundpipe.finetune.trainer.trainer import RoundPipeTrainer


class FollowUp:
    """Does what the flags of a trainer's ``control`` ask for after the steps that ``run`` has done.

    ``standing``: whose losses the next record is the mean of. ``is_evaluated``: no evaluation is
    owed, nor what its metrics decide. ``started``: when the run began (`time.time`).
    """

    def __init__(self, trainer: RoundPipeTrainer, run: Run, standing: Standing) -> None:
        self._trainer, self._run, self._standing = trainer, run, standing
        self._is_saving = False
        self.is_evaluated = True
        self.started = time.time()

    def do(self) -> bool:
        """Log, evaluate and save as the flags say; False: the evaluation was cut short."""
        trainer = self._trainer
        if trainer.control.should_log and trainer.state.global_step > self._standing.last_logged:
            self._log()
        if trainer.control.should_evaluate or not self.is_evaluated:
            metrics = self._metrics()
            if metrics is None:
                return False
            is_new_best = self._take_metrics(metrics)
            self.is_evaluated = True
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_new_best
            elif is_new_best and trainer.keeps_best:
                trainer.control.should_save = True
        if trainer.control.should_save:
            self._save()
        return True

    def is_saving_asked(self) -> bool:
        """Whether somebody but callbacks asks for a checkpoint.

        By a file; by the clock and at the end where the config goes by the clock.
        """
        run, is_last = self._run, self._trainer.control.should_training_stop
        is_timed = run.job.config.save_strategy == "minutes" and (is_last or run.saver.is_due)
        return run.folder.is_saving_asked() or is_timed

    def owed(self) -> dict[str, bool]:
        """What is wanted and was not done yet, by the words of `Standing.owes`."""
        control = self._trainer.control
        is_logged = self._run.training.done <= self._standing.last_logged
        return {
            "should_log": control.should_log and not is_logged,
            "should_evaluate": control.should_evaluate,
            "should_save": control.should_save and not self._is_saving,
            "metrics": not (self.is_evaluated or control.should_evaluate),
        }

    def _log(self) -> None:
        training, trainer = self._run.training, self._trainer
        training.settle()
        record = training.log.take()
        logs: dict[str, Any] = {"loss": self._standing.take()}
        if training.log.last_norm is not None:
            logs["grad_norm"] = training.log.last_norm
        if self._standing.learning_rate is not None:
            logs["learning_rate"] = self._standing.learning_rate
        logs["num_tokens"] = training.log.num_tokens
        if record is not None:
            training.log.show(record)
            if record.seconds > 0:
                logs["tokens_per_second"] = round(record.tokens / record.seconds, 1)
        trainer.log(logs, start_time=self.started)

    def _metrics(self) -> dict[str, float] | None:
        """Of an evaluation, or of one whose metrics were not taken yet; None: it was cut short."""
        trainer = self._trainer
        if not trainer.control.should_evaluate:
            return metrics_of(trainer.state)
        self.is_evaluated = False
        metrics: dict[str, float] = trainer.evaluate_now()
        if not trainer.is_evaluation_whole:
            trainer.control.should_evaluate = True
            return None
        return metrics

    def _take_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are the best so far, by the metric that args name."""
        args, state, training = self._trainer.args, self._trainer.state, self._run.training
        if args.metric_for_best_model is None:
            return False
        value = metrics[self._trainer.best_metric_name(metrics)]
        best = state.best_metric
        if training.optimizing.follows_metrics:
            scheduler: Any = training.scheduler
            scheduler.step(value)
        is_better = best is None or (value > best if args.greater_is_better else value < best)
        if is_better and math.isfinite(value):
            state.best_metric = value
            if args.save_strategy != SaveStrategy.NO or self._trainer.keeps_best:
                state.best_global_step = state.global_step
            return True
        return False

    def _save(self) -> None:
        run, training, state = self._run, self._run.training, self._trainer.state
        self._is_saving = True
        training.settle()
        is_best = state.best_global_step == training.done
        if is_best:
            training.best.step, training.best.loss = training.done, state.best_metric
            state.best_model_checkpoint = str(run.saver.path(training.done))
        run.saver.save(is_best=is_best)
        run.folder.saving_done()
        if is_watched(self._trainer, "on_save"):
            run.saver.wait()  # callbacks find the files
        self._is_saving = False
        tell(self._trainer, "on_save")
