"""A run's steps told to callbacks of transformers, whose wishes are done.

What is told, in which order, and what a flag asks for is as transformers' Trainer has it::

    train_begin
      epoch_begin
        step_begin  substep_end x (microbatches - 1)  pre_optimizer_step  optimizer_step  step_end
          (log)  (prediction_step x batches, log, evaluate)  (save)
      epoch_end
          (log)  (prediction_step x batches, log, evaluate)  (save)
    (log)  train_end

`DefaultFlowCallback` among the callbacks, which is transformers' own, decides when; so counts are
its counts. A step here runs all its microbatches at once: their ends are told when it begins.

A step that is given again, because a device's memory was short, is told of once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState, TrainerState

from roundpipe.finetune.output.earlier import STATE_FILE
from roundpipe.finetune.trainer.callback_handler import is_watched, tell
from roundpipe.finetune.trainer.evaluating import speed
from roundpipe.finetune.trainer.follow_up import FollowUp
from roundpipe.finetune.trainer.standing import Standing, going_on, keep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.run.steps import Run
    from roundpipe.finetune.run.training import Training
    from roundpipe.finetune.trainer.epochs import Epochs
    from roundpipe.finetune.trainer.trainer import RoundPipeTrainer


class CallbackEvents:
    """Events of one ``train()``; keeps a trainer's ``state`` and follows its ``control``."""

    def __init__(self, trainer: RoundPipeTrainer, epochs: Epochs) -> None:
        self._trainer, self._epochs = trainer, epochs
        self._run: Run | None = None
        self._epoch = 0  # that is trained, or comes next
        self._is_in_epoch = self._is_ending = False
        self._is_over = self._is_given_up = False
        self._told = {"begin": 0, "gradients": 0, "update": 0, "end": 0}  # the last step of each
        self._standing = Standing()
        self._follow_up: FollowUp  # from `begin` on
        self._begun = 0

    # ---- what the loop asks and tells

    @property
    def is_over(self) -> bool:
        """Whether callbacks want no further step, or all epochs are over."""
        return self._is_over

    def begin(self, run: Run) -> None:
        """Set the state up, from a checkpoint's where the run goes on; tell ``train_begin``."""
        trainer, training = self._trainer, run.training
        self._run = run
        self._begin_state(run)
        self._follow_up = FollowUp(trainer, run, self._standing)
        self._begun = training.done
        self._told = dict.fromkeys(self._told, training.done)
        self._epoch = (training.done + training.passed_over) // self._epochs.steps
        handler = trainer.callback_handler
        handler.model, handler.optimizer = trainer.model, training.optimizer
        handler.lr_scheduler = trainer.lr_scheduler = training.scheduler
        handler.train_dataloader = trainer.train_batches
        tell(self._trainer, "on_train_begin")
        if trainer.args.eval_on_start:
            trainer.evaluate_now()
        self._is_over = self._epoch >= trainer.state.num_train_epochs
        self._catch_up()
        if self._is_given_up and not self._is_over:
            run.terminal.line(
                f"early_stopping_patience had ended training after step {training.done}"
                "\nhint: a larger one goes on"
            )
            self._is_over = True

    def step_begins(self, step: int) -> bool:
        """Tell ``epoch_begin`` and ``step_begin``; False where a callback breaks the step off."""
        if not self._is_in_epoch:
            self._is_in_epoch = True
            tell(self._trainer, "on_epoch_begin")
        if step <= self._told["begin"]:
            return True
        self._told["begin"] = step
        tell(self._trainer, "on_step_begin")
        for _ in range(self._epochs.microbatches_of(step + self._training.passed_over) - 1):
            tell(self._trainer, "on_substep_end")
            if self._is_broken_off:
                self._told["begin"] = step - 1
                self._end_epoch()
                return False
        return True

    def gradients_made(self, batch: Mapping[str, Any]) -> None:
        """Tell ``pre_optimizer_step``; gradients are in ``.grad`` where a callback looks at it."""
        step = self._training.done + 1
        if step <= self._told["gradients"]:
            return
        self._told["gradients"] = step
        trainer = self._trainer
        self._count(batch)
        if is_watched(trainer, "on_pre_optimizer_step"):
            trainer.model.synchronize()
        tell(self._trainer, "on_pre_optimizer_step")

    def updated(self) -> None:
        """Tell ``optimizer_step``."""
        if self._training.done > self._told["update"]:
            self._told["update"] = self._training.done
            tell(self._trainer, "on_optimizer_step")

    def step_ended(self) -> None:
        """Tell ``step_end``, and ``epoch_end`` after an epoch's last; do what is wanted."""
        step = self._training.done
        if step <= self._told["end"]:
            return
        self._told["end"] = step
        self._note(step)
        self._end_step()

    def trainer_state(self) -> dict[str, Any]:
        """transformers' own state, callbacks' states among it."""
        trainer = self._trainer
        self._note(self._training.done)
        states: Any = trainer.state.stateful_callbacks
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(callback, ExportableState):
                states[type(callback).__name__] = callback.state()
        keep(replace(self._standing, owes=self._owed()), states)
        told: dict[str, Any] = asdict(trainer.state)
        return told

    def finish(self) -> dict[str, float]:
        """Log what the whole run came to, and return it; then ``train_end`` is to be told."""
        trainer, state = self._trainer, self._trainer.state
        steps = state.global_step - self._begun
        order, args = self._training.order, trainer.args
        samples = order.num_rows * args.num_train_epochs
        if args.max_steps > 0:
            samples = args.max_steps * trainer.config.batch_size
        metrics = speed(
            "train",
            self._follow_up.started,
            num_samples=samples * steps / max(state.max_steps, 1),
            num_steps=steps,
        )
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = self._standing.mean_loss
        trainer.log(metrics)
        return metrics

    def end(self) -> None:
        """Tell ``train_end``."""
        tell(self._trainer, "on_train_end")

    # ---- state

    @property
    def _training(self) -> Training:
        assert self._run is not None, "begin first"
        return self._run.training

    def _begin_state(self, run: Run) -> None:
        trainer, order = self._trainer, run.training.order
        checkpoint = run.folder.earlier.checkpoint
        exported = [
            callback
            for callback in (*trainer.callback_handler.callbacks, trainer.control)
            if isinstance(callback, ExportableState)
        ]
        if checkpoint is None:
            state: Any = TrainerState(stateful_callbacks=exported)  # type: ignore[arg-type, unused-ignore]
            self._standing = Standing()
        else:
            state, self._standing, self._is_given_up = going_on(
                checkpoint / STATE_FILE, exported, step=run.training.done
            )
        trainer.state = state
        state.train_batch_size = trainer.train_batch_size
        state.compute_steps(trainer.args, order.total_steps)
        state.max_steps = order.total_steps
        epochs = trainer.args.num_train_epochs
        if trainer.args.max_steps > 0:
            epochs = order.total_steps / order.steps_per_epoch
        state.num_train_epochs = math.ceil(epochs)

    def _count(self, batch: Mapping[str, Any]) -> None:
        """Tokens and operations of a step, which has all weights multiply all tokens six times."""
        trainer, ids = self._trainer, batch["input_ids"]
        state, seen = trainer.state, trainer.args.include_num_input_tokens_seen
        tokens = self._run.job.batches.tokens_in(dict(batch)) if self._run is not None else 0
        state.total_flos += 6.0 * tokens * trainer.num_matrix_weights
        if seen not in ("no", False):
            state.num_input_tokens_seen += tokens if seen == "non_padding" else ids.numel()

    def _note(self, step: int) -> None:
        """Have the state after ``step``: the next one, or one before, if others were taken back."""
        state, standing, last = self._trainer.state, self._standing, self._training.last
        if step == state.global_step:
            return
        standing.forget_after(step)
        if standing.counted < step:
            assert last is not None, "a step was made"
            loss, losses = last.loss, standing.losses
            if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                loss = sum(losses) / (1 + len(losses))
            losses.append(loss)
            standing.learning_rate = last.learning_rate
        state.global_step, state.epoch = step, self._epochs.after(step + self._training.passed_over)

    # ---- epochs, and what follows

    @property
    def _is_broken_off(self) -> bool:
        control = self._trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def _end_step(self, *, is_told: bool = False) -> None:
        training, control = self._training, self._trainer.control
        if not is_told:
            tell(self._trainer, "on_step_end")
        if self._follow_up.is_saving_asked():
            control.should_save = True
        is_last = (training.done + training.passed_over) % self._epochs.steps == 0
        if self._follow_up.do() and (is_last or self._is_broken_off):
            self._end_epoch()

    def _owed(self) -> list[str]:
        """What is to follow the steps done and has not yet; see `Standing`."""
        control, step = self._trainer.control, self._training.done
        if step > self._told["end"]:
            return ["step_end"]
        if step < self._told["end"] or step == 0:
            return []
        owed = {
            **self._follow_up.owed(),
            "epoch_end": self._is_in_epoch and not self._is_ending,
            "should_epoch_stop": self._is_in_epoch and control.should_epoch_stop,
        }
        return [name for name, is_owed in owed.items() if is_owed]

    def _catch_up(self) -> None:
        """Do what was owed when the run ended that is gone on with."""
        owes, self._standing.owes = set(self._standing.owes), []
        training, control = self._training, self._trainer.control
        position = training.done + training.passed_over
        if not owes or (owes == {"epoch_end"} and position % self._epochs.steps):
            return
        for flag in ("should_log", "should_evaluate", "should_save", "should_epoch_stop"):
            setattr(control, flag, flag in owes)
        self._follow_up.is_evaluated = "metrics" not in owes
        self._epoch = (position - 1) // self._epochs.steps
        if owes & {"step_end", "epoch_end"}:
            self._is_in_epoch = True
            self._end_step(is_told="step_end" not in owes)
        elif self._follow_up.do() and control.should_epoch_stop:
            self._pass_over_rest()
        self._epoch = (training.done + training.passed_over) // self._epochs.steps
        self._is_in_epoch = False  # as transformers has it, which tells of its beginning again
        is_all = self._epoch >= self._trainer.state.num_train_epochs
        self._is_over = bool(control.should_training_stop or is_all)

    def _pass_over_rest(self) -> None:
        """Have the next step be the first of the next epoch."""
        training, starts = self._training, self._epoch * self._epochs.steps
        made = (training.done + training.passed_over) % self._epochs.steps
        if made or training.done + training.passed_over == starts:
            training.passed_over += self._epochs.steps - made

    def _end_epoch(self) -> None:
        control = self._trainer.control
        self._is_ending = True
        tell(self._trainer, "on_epoch_end")
        self._follow_up.do()
        if control.should_epoch_stop:
            self._pass_over_rest()
        self._is_in_epoch = self._is_ending = False
        self._epoch += 1
        is_all = self._epoch >= self._trainer.state.num_train_epochs
        self._is_over = bool(control.should_training_stop or is_all)
