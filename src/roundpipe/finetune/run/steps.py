"""A run's steps, from a model that is ready to a result that is saved.

RoundPipe → optimizer → steps and evaluations → answers → result

Once steps have been made, whatever ends the run early, Ctrl-C or a failure, leaves the newest
weights in a folder of their own.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import RoundPipeError
from roundpipe.finetune.data.collate import collate
from roundpipe.finetune.data.length import RunLength, sample_order
from roundpipe.finetune.output.run_folder import RunState
from roundpipe.finetune.output.sample import answer_prompts
from roundpipe.finetune.run.busy import BusyMeter
from roundpipe.finetune.run.evaluate import evaluation_loss
from roundpipe.finetune.run.recorder import TimelineRecorder
from roundpipe.finetune.run.result import save_early, save_run, show_usage
from roundpipe.finetune.run.schedule import make_scheduler, rate_factor, warmup_step_count
from roundpipe.finetune.run.step_log import StepLog, StepRecord
from roundpipe.optim import AdamW
from roundpipe.optim.scaler import GradScaler
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim.lr_scheduler import LRScheduler

    from roundpipe.engine.updates import StepResult
    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.settings.config import TrainConfig


def train_job(job: Job, folder: RunFolder, terminal: Terminal) -> list[dict[str, Any]]:
    """Train what ``job`` holds, save the result into ``folder``, and return the log's records."""
    config, length = job.config, RunLength.of(job.config, len(job.dataset.samples))
    with _wrapped(job) as trainer:
        before = _answers(job, trainer, {}, terminal)
        torch.manual_seed(config.seed)
        folder.start(config, replace=folder.state is RunState.NEW)
        log = StepLog(
            folder,
            total_steps=length.total_steps,
            logging_steps=config.logging_steps,
            scaled=_has_fp16(job),
        )
        recorder = TimelineRecorder(trainer, job.devices, title=job.header())
        with (
            terminal.logging_to(folder.path / "run.log"),
            _kept_when_ended_early(job, trainer, folder, recorder, log, terminal),
        ):
            with terminal.progress(length.total_steps) as progress:
                log.show_on(progress)
                _run_steps(job, trainer, length, recorder, log)
            weights = _result(job, trainer)
            recorder.take()
            after = _answers(job, trainer, weights, terminal)
            terminal.answers(config.sample_prompts, before, after)
            with terminal.waiting("saving"):
                recorder.write(folder)
                save_run(job, weights, folder, length.state(log.history))
            show_usage(job, terminal)
    return log.history


def _wrapped(job: Job) -> RoundPipe:
    config = job.config
    return RoundPipe(
        job.model,
        optim_dtype=_optim_dtype(job),
        devices=list(job.devices),
        schedule=config.schedule,
        device_memory_limit=config.device_memory_limit,
        pinned_memory_limit=job.pinned_memory_limit,
        bases=job.base.bases,
        grad_scaler=GradScaler() if _has_fp16(job) else None,
    )


def _optim_dtype(job: Job) -> torch.dtype | None:
    """With narrow moments bf16 weights need no master: the optimizer keeps what they lack of it."""
    dtypes = {p.dtype for p in job.model.parameters() if p.requires_grad}
    is_own = job.config.optim_state_dtype != "fp32" and dtypes == {torch.bfloat16}
    return torch.bfloat16 if is_own else None


def _has_fp16(job: Job) -> bool:
    return any(p.dtype == torch.float16 for p in job.model.parameters())


def _result(job: Job, trainer: RoundPipe) -> Mapping[str, torch.Tensor]:
    """The newest weights that are to be saved."""
    return trainer.trained_state_dict() if job.is_adapter else trainer.newest_weights()


def _run_steps(
    job: Job, trainer: RoundPipe, length: RunLength, recorder: TimelineRecorder, log: StepLog
) -> None:
    """Run every optimizer step, with the evaluations that are due in between."""
    config = job.config
    optimizer = _make_optimizer(config, trainer)
    scheduler = _make_scheduler(config, optimizer, length)
    trainer.train()
    busy = BusyMeter(lambda: trainer.timeline.spans, len(job.devices))
    started = time.perf_counter()
    result: StepResult | None = None
    for step, indices in enumerate(sample_order(config, length), start=1):
        batch = collate([job.dataset.samples[i] for i in indices], job.pad_token_id)
        loss = trainer.forward_backward(
            input_kwargs=batch, run_config=_run_config(config, len(indices))
        )
        # The step before is known by now. One that was skipped counts for no schedule.
        if result is not None and not result.skipped:
            scheduler.step()
        rate = scheduler.get_last_lr()[0]
        result = trainer.step(
            optimizer, is_async=config.staleness == 1, max_grad_norm=config.max_grad_norm
        )
        record = StepRecord(
            step=step,
            epoch=length.epoch(step),
            loss=float(loss),
            learning_rate=float(rate),
            tokens=int(batch["attention_mask"].sum()),
            seconds=time.perf_counter() - started,
            busy_share=busy.share(),
        )
        started = time.perf_counter()
        log.add(record, result)
        recorder.sample()
        if length.is_evaluation_due(config, step):
            trainer.eval()  # waits, so that the rest of this step counts as training
            paused = time.perf_counter()
            log.add_evaluation(step, length.epoch(step), _evaluate(job, trainer))
            busy.skip()
            started += time.perf_counter() - paused
    log.settle()


def _make_optimizer(config: TrainConfig, trainer: RoundPipe) -> AdamW:
    """AdamW over the master weights; biases and norms (vectors) do not decay."""
    named = list(trainer.optim_named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        state_dtype=config.optim_state_dtype,
    )


def _make_scheduler(config: TrainConfig, optimizer: AdamW, length: RunLength) -> LRScheduler:
    factor = rate_factor(
        config.lr_scheduler_type,
        num_warmup_steps=warmup_step_count(config.warmup_steps, length.total_steps),
        total_steps=length.total_steps,
        min_ratio=config.min_lr_ratio or 0.0,
    )
    return make_scheduler(optimizer, factor)


def _run_config(config: TrainConfig, num_samples: int) -> RoundPipeRunConfig:
    count = config.num_microbatch
    if config.micro_batch_size is not None:
        count = -(-num_samples // config.micro_batch_size)
    return RoundPipeRunConfig(num_microbatch=count, recompute_grain=config.recompute_grain)


def _evaluate(job: Job, trainer: RoundPipe) -> float:
    """Loss on the evaluation data with the newest weights, without dropout."""

    def forward(**batch: Any) -> Any:
        run_config = _run_config(job.config, len(batch["input_ids"]))
        return trainer(**batch, roundpipe_run_config=run_config)

    trainer.eval()
    try:
        return evaluation_loss(
            forward,
            job.dataset.eval_samples,
            batch_size=job.config.batch_size,
            pad_token_id=job.pad_token_id,
            vocabulary=_vocabulary(job.model),
        )
    finally:
        trainer.train()


def _vocabulary(model: Any) -> int:
    return getattr(model.config.get_text_config(), "vocab_size", 0)


def _answers(
    job: Job, trainer: RoundPipe, weights: Mapping[str, torch.Tensor], terminal: Terminal
) -> list[str]:
    """Answers with ``weights`` over the model's own; what is in 4 bits is unpacked for it."""
    prompts = job.config.sample_prompts
    if not prompts:
        return []
    with terminal.waiting("answering the sample prompts"):
        if job.base.is_packed:
            weights = trainer.state_dict()
        return answer_prompts(job.model, weights, job.tokenizer, prompts)


@contextlib.contextmanager
def _kept_when_ended_early(
    job: Job,
    trainer: RoundPipe,
    folder: RunFolder,
    recorder: TimelineRecorder,
    log: StepLog,
    terminal: Terminal,
) -> Iterator[None]:
    """Save the newest committed weights when Ctrl-C or a failure ends the block; raise it on."""
    try:
        yield
    except (KeyboardInterrupt, RoundPipeError) as end:
        why = "interrupted" if isinstance(end, KeyboardInterrupt) else "failed"
        if log.last_step == 0:
            terminal.line(f"{why} before the first step was done: there is nothing to keep")
            raise
        recorder.take()
        terminal.line(f"{why} after step {log.last_step}; saving the weights of that step …")
        try:
            kept = save_early(job, _result(job, trainer), folder)
        except Exception as error:  # what ended the run is what must be told
            terminal.line(f"they could not be saved: {error}")
        else:
            terminal.line(
                f"saved {kept} (loads like a finished result); the log is in "
                f"{job.config.output_dir}; the same command starts over"
            )
        recorder.write(folder)
        raise
