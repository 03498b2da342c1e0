"""A wrapped model with everything that makes its steps, and what of it a checkpoint must hold.

[Note: one step behind] A step's norm, and whether it was skipped, are known only when it has
committed; asking at once would stop the pipeline. So the learning rate moves on, and the step is
logged, when the next one has been given: `Training.settle` catches up where nothing follows yet.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.run.batches import batches_of, cut_of
from roundpipe.finetune.run.best import Best
from roundpipe.finetune.run.busy import BusyMeter
from roundpipe.finetune.run.evaluate import Evaluation, evaluate
from roundpipe.finetune.run.events import ByConfig
from roundpipe.finetune.run.retry import Splitting, lost_memory
from roundpipe.finetune.run.schedule import factor_of, make_scheduler
from roundpipe.finetune.run.step_log import StepLog, StepRecord
from roundpipe.models.loss import count_trained_tokens
from roundpipe.optim import AdamW, decay_groups
from roundpipe.optim.scaler import GradScaler
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer

    from roundpipe.config import RoundPipeRunConfig
    from roundpipe.engine.updates import StepResult
    from roundpipe.finetune.output.progress import Progress
    from roundpipe.finetune.run.due import Due
    from roundpipe.finetune.run.events import Events
    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.settings.config import TrainConfig


@dataclass
class Optimizing:
    """An optimizer over the masters of a model, and what moves its learning rate.

    ``scheduler`` None: as the config says.
    """

    optimizer: Optimizer
    scheduler: Any = None

    @property
    def follows_metrics(self) -> bool:
        """Whether the rate hangs on evaluations, and is moved on by them alone."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


class Training:
    """``pipe`` and what drives it; ``done`` counts the steps that were given so far.

    ``events`` is told of each step. ``optimizing``: None: an optimizer as the config says.
    """

    def __init__(
        self,
        job: Job,
        pipe: RoundPipe,
        log: StepLog,
        *,
        events: Events | None = None,
        optimizing: Optimizing | None = None,
    ) -> None:
        self.job, self.pipe, self.log = job, pipe, log
        self.events = events or ByConfig()
        config = job.config
        self.order = job.order
        self.optimizing = optimizing or Optimizing(make_optimizer(config, pipe))
        self._options = [_options_of(group) for group in self.optimizer.param_groups]
        self._is_own_rate = self.optimizing.scheduler is None
        self.scheduler = self.optimizing.scheduler or make_scheduler(
            self.optimizer, config, self.order.total_steps
        )
        self.splitting = Splitting(config.num_microbatch)
        self._eval_splitting = Splitting()  # what an evaluation needs must not change training
        self.best = Best()
        self.done = 0
        self.passed_over = 0  # steps of the order that were not made: epochs that were broken off
        self.last: StepRecord | None = None
        self.evaluated = 0  # the last step after which an evaluation was made
        self.doing = "ending"  # what a signal finds under way
        self._given: StepResult | None = None  # of which the scheduler does not know yet
        self._rates: list[Any] = []  # of the optimizer's groups, when that was given
        self._busy = BusyMeter(lambda: pipe.timeline.spans, len(job.devices))
        self._started = time.perf_counter()

    @property
    def optimizer(self) -> Optimizer:
        """What updates the masters."""
        return self.optimizing.optimizer

    def is_evaluation_due(self, due: Due) -> bool:
        """Whether an evaluation after the steps done is due and was not made."""
        return self.evaluated != self.done and due.is_evaluation_due(self.done)

    def begin(self, progress: Progress) -> None:
        """Be about to make steps, which ``progress`` shows: time counts from now on."""
        self.log.show_on(progress)
        self.pipe.train()
        self._started = time.perf_counter()

    def make_step(self, step: int) -> None:
        """Give one optimizer step and log the one before it.

        Returns when its loss is known. Raises what made it or the step before fail.
        """
        self.doing = f"finishing step {step}"
        config, batches = self.job.config, self.job.batches
        batch = batches.batch(self.job.dataset.samples, self.order.rows(step + self.passed_over))
        loss = self._forward_backward(batch)
        self.events.gradients_made(batch)
        self._tell_scheduler()
        rate = float(self.scheduler.get_last_lr()[0])
        result = self.pipe.step(
            self.optimizer, is_async=config.staleness == 1, max_grad_norm=config.max_grad_norm
        )
        self._given, self.done, self._rates = result, step, self._rates_now()
        self.last = record = StepRecord(
            step=step,
            epoch=self.order.epoch(step + self.passed_over),
            loss=float(loss),
            learning_rate=rate,
            tokens=batches.tokens_in(batch),
            trained_tokens=count_trained_tokens(batch["labels"]),
            seconds=time.perf_counter() - self._started,
            busy_share=self._busy.share(),
        )
        self._started = time.perf_counter()
        self.log.add(record, result)
        self.events.updated()  # last: whoever fails here finds the step counted
        self._rates = self._rates_now()

    def settle(self) -> None:
        """Wait for the last given step, log it and move the learning rate on.

        A step that failed is taken back: given again in smaller microbatches if memory was short,
        otherwise what made it fail is raised.
        """
        is_lost = False
        while True:
            try:
                if is_lost:
                    self.make_step(self.done + 1)
                self.log.settle()
                self._tell_scheduler()
            except (RoundPipeError, torch.OutOfMemoryError) as error:
                self.recover(error)
                is_lost = True
            else:
                return

    def recover(self, error: Exception) -> None:
        """Take back what failed, and go on with smaller microbatches if memory was short.

        Raises ``error`` where something else was wrong, or microbatches cannot be smaller.
        """
        self._take_back()
        if not lost_memory(error):
            raise error
        rows = len(self.order.rows(self.done + 1 + self.passed_over))
        count = self._run_config(rows).num_microbatch
        self.splitting.halve(error, rows, count=count, say=self.log.say)
        self.pipe.plan_again()

    def evaluate(self, should_stop: Callable[[], bool]) -> bool:
        """Evaluate the newest weights after the steps done; whether they are the best so far.

        An evaluation that was stopped counts as not made.
        """
        with self.paused():
            found = self._evaluation(should_stop)
        if not found.is_whole:
            return False
        self.evaluated = self.done
        self.log.add_evaluation(
            self.done,
            self.order.epoch(self.done + self.passed_over),
            found.loss,
            tokens=found.tokens,
            seconds=found.seconds,
        )
        return self.best.add(self.done, found.loss)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Have the model in evaluation mode while the block runs; no step is under way then.

        What the block takes is no time of steps.
        """
        self.doing = f"ending the evaluation after step {self.done}"
        self.settle()
        self.pipe.eval()  # waits, so that the rest of this step counts as training
        paused = time.perf_counter()
        try:
            yield
        finally:
            self.pipe.train()
            self._busy.skip()
            self._started += time.perf_counter() - paused

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The newest weights that are to be saved."""
        return weights_to_save(self.job, self.pipe)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the RoundPipe's own state; nothing may be under way."""
        return {
            "global_step": self.done,
            "passed_over": self.passed_over,
            "evaluated": self.evaluated,
            "best": self.best.state(),
            "splitting": self.splitting.state(),
            "log": self.log.state(),
        }

    def restore(self, state: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Be as when ``state`` was taken; ``history``: the log's records until then."""
        self.done, self.evaluated = int(state["global_step"]), int(state["evaluated"])
        self.passed_over = int(state.get("passed_over", 0))
        self.best.restore(state["best"])
        self.splitting.restore(state["splitting"])
        self.log.restore(state["log"], history)

    def follow_config(self) -> None:
        """Go on with this config's learning rate and length where the checkpoint's were others."""
        if not self._is_own_rate:
            return
        made = self.scheduler.last_epoch
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group.update(options, initial_lr=options["lr"])
        factor = factor_of(self.job.config, self.order.total_steps)
        self.scheduler = LambdaLR(self.optimizer, factor, last_epoch=made - 1)

    def _tell_scheduler(self) -> None:
        """Move the rate on for the last given step; one that was skipped counts for none.

        A rate that somebody has set since that step is for the next one, as where the scheduler
        had moved at once.
        """
        is_made = self._given is not None and not self._given.skipped
        if is_made and not self.optimizing.follows_metrics:
            before, now, groups = self._rates, self._rates_now(), self.optimizer.param_groups
            for group, rate in zip(groups, before, strict=False):
                group["lr"] = rate
            self.scheduler.step()
            for group, was, rate in zip(groups, before, now, strict=False):
                group["lr"] = group["lr"] if rate == was else rate
        self._given = None

    def _rates_now(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _take_back(self) -> None:
        """Forget the last given step if it failed: weights are those of the step before."""
        given = self._given
        if given is None:
            return
        try:
            self._tell_scheduler()
        except RoundPipeError:
            self._given = None
            self.log.forget(self.done)
            self.done -= 1

    def _evaluation(self, should_stop: Callable[[], bool]) -> Evaluation:
        job = self.job
        return evaluate(
            self.pipe,
            batches_of(job.batches, job.dataset.eval_samples, job.config.batch_size),
            run_config=self._run_config,
            should_stop=should_stop,
            tell=self.log.evaluating(len(job.dataset.eval_samples)),
            splitting=self._eval_splitting,
            say=self.log.say,
        )

    def _forward_backward(self, batch: dict[str, torch.Tensor]) -> Any:
        run_config, loss = self._run_config(len(batch["labels"])), self.job.loss
        if loss is None:
            return self.pipe.forward_backward(input_kwargs=batch, run_config=run_config)
        inputs, labels = loss.parted(batch)
        return self.pipe.forward_backward(
            input_kwargs=inputs,
            label=labels,
            loss_fn=loss.over(labels),
            run_config=loss.run_config(run_config, len(labels)),
        )

    def _run_config(self, num_rows: int) -> RoundPipeRunConfig:
        return cut_of(self.job.batches, self.job.config, self.splitting, num_rows)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group was made with: an earlier run's scheduler may have moved its rate."""
    options = {name: value for name, value in group.items() if name != "params"}
    return {**options, "lr": group.get("initial_lr", group["lr"])}


def weights_to_save(job: Job, pipe: RoundPipe) -> Mapping[str, torch.Tensor]:
    """The newest weights of a run's result: an adapter's alone where one is trained."""
    return pipe.trained_state_dict() if job.is_adapter else pipe.newest_weights()


def wrapped(job: Job) -> RoundPipe:
    """The job's model on its devices."""
    config = job.config
    return RoundPipe(
        job.model,
        optim_dtype=_optim_dtype(job),
        devices=list(job.devices),
        schedule=config.schedule,
        device_memory_limit=config.device_memory_limit,
        pinned_memory_limit=job.pinned_memory_limit,
        bases=job.base.bases,
        grad_scaler=GradScaler() if has_fp16(job) else None,
        seed=config.seed,
        loss_reduction=None if job.loss is None else "sum",
    )


def has_fp16(job: Job) -> bool:
    """Whether losses are scaled."""
    return any(p.dtype == torch.float16 for p in job.model.parameters())


def _optim_dtype(job: Job) -> torch.dtype | None:
    """With narrow moments bf16 weights need no master: the optimizer keeps what they lack of it."""
    dtypes = {p.dtype for p in job.model.parameters() if p.requires_grad}
    is_own = job.config.optim_state_dtype != "fp32" and dtypes == {torch.bfloat16}
    return torch.bfloat16 if is_own else None


def make_optimizer(config: TrainConfig, pipe: RoundPipe) -> AdamW:
    """AdamW over the master weights; biases and norms do not decay, by the Trainer's rule."""
    named = pipe.optim_named_parameters()
    return AdamW(
        decay_groups(named, config.weight_decay, model=pipe.model),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        state_dtype=config.optim_state_dtype,
    )
