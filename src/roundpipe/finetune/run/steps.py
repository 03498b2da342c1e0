"""A run's steps, from a model that is ready to a result that is saved.

RoundPipe → (checkpoint) → step → evaluation → checkpoint → step → … → answers → result

Whatever ends the run early, a signal or a failure, leaves a checkpoint of the last step that was
done: the same command goes on there.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.finetune.model.neftune import add_neftune
from roundpipe.finetune.model.packing_check import check_packing
from roundpipe.finetune.output.answers import answers_text
from roundpipe.finetune.output.earlier import STATE_FILE
from roundpipe.finetune.output.sample import Answerer
from roundpipe.finetune.run.due import Due
from roundpipe.finetune.run.events import ByConfig
from roundpipe.finetune.run.loggers import open_loggers
from roundpipe.finetune.run.recorder import TimelineRecorder
from roundpipe.finetune.run.result import save_run, show_usage
from roundpipe.finetune.run.saving import Saver
from roundpipe.finetune.run.signals import Stopped
from roundpipe.finetune.run.step_log import StepLog
from roundpipe.finetune.run.training import Training, has_fp16, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.events import Events
    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.run.signals import Stop
    from roundpipe.finetune.run.training import Optimizing
    from roundpipe.roundpipe import RoundPipe


@dataclass(frozen=True)
class Run:
    """Steps under way and everything that is told of them."""

    job: Job
    training: Training
    saver: Saver
    recorder: TimelineRecorder
    folder: RunFolder
    terminal: Terminal
    stop: Stop
    goes_on: str | None = None


@dataclass(frozen=True)
class Around:
    """Where a run works: its folder, what it shows, what may stop it, who is told of its steps."""

    folder: RunFolder
    terminal: Terminal
    stop: Stop
    events: Events = field(default_factory=ByConfig)
    optimizing: Optimizing | None = None  # None: an optimizer as the config says
    goes_on: str | None = None  # what goes on from a checkpoint; None: the same command
    keeps_log: bool = True  # False: the events write the log's records


def train_job(job: Job, folder: RunFolder, terminal: Terminal, stop: Stop) -> list[dict[str, Any]]:
    """Train what ``job`` holds, save the result into ``folder``, and return the log's records.

    Raises `Stopped` when a signal came, after a checkpoint was saved, and what made a step fail.
    """
    with wrapped_for_run(job) as pipe, contextlib.ExitStack() as parts:
        before = sample_answers(job, pipe, terminal)
        torch.manual_seed(job.config.seed)
        run = started(job, pipe, Around(folder, terminal, stop), parts)
        with kept_when_ended_early(run):
            run_steps(run)
            _finish(run, before)
        show_usage(job, terminal)
    stop.check()
    return run.training.log.history


def run_steps(run: Run) -> None:
    """Run every optimizer step that is left, with what its events say is to follow each.

    Raises `Stopped` when a signal has asked for it, and what makes a step fail.
    """
    training, stop = run.training, run.stop
    events, total = training.events, training.order.total_steps
    with run.terminal.progress(total, done=training.done) as progress:
        training.begin(progress)
        events.begin(run)
        while not (events.is_over or stop.is_asked):
            step = training.done + 1
            if not events.step_begins(step):
                continue
            try:
                training.make_step(step)
            except (RoundPipeError, torch.OutOfMemoryError) as error:
                training.recover(error)  # smaller microbatches, or it is raised
            else:
                events.step_ended()
            run.recorder.sample()
        training.settle()
        stop.check()
        training.log.finish()
        if training.best.is_given_up(run.job.config.early_stopping_patience):
            progress.say(_stopped_early(training))


def _stopped_early(training: Training) -> str:
    best = training.best
    return (
        f"stopped early after step {training.done}: {best.num_worse} evaluations were no better "
        f"than that after step {best.step}"
    )


@contextlib.contextmanager
def wrapped_for_run(job: Job) -> Iterator[RoundPipe]:
    """The model on its devices, with noise on its embeddings if that is wanted."""
    config = job.config
    with contextlib.ExitStack() as undo:
        if config.neftune_noise_alpha is not None:
            undo.callback(add_neftune(job.model, config.neftune_noise_alpha).remove)
        pipe = undo.enter_context(wrapped(job))
        if config.packing:
            check_packing(pipe, vocabulary=_vocabulary(job.model))
        yield pipe


def _vocabulary(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "vocab_size", 0))


def started(job: Job, pipe: RoundPipe, around: Around, parts: contextlib.ExitStack) -> Run:
    """Make the run, from its checkpoint if it goes on from one, and the folder its own.

    Signals are only noted from here on, until ``parts`` ends.
    """
    folder, terminal, stop = around.folder, around.terminal, around.stop
    config, earlier = job.config, folder.earlier
    loggers = open_loggers(
        config,
        folder.path,
        say=terminal.line,
        after_step=earlier.step,
        about=config.model_dump(mode="json"),
        environment=job.environment,
    )
    parts.push(lambda kind, *_: loggers.close(ok=kind is None))
    total = job.order.total_steps
    log = StepLog(
        folder,
        total_steps=total,
        logging_steps=config.logging_steps if around.keeps_log else None,
        scaled=has_fp16(job),
        loggers=loggers,
        devices=job.devices,
    )
    training = Training(job, pipe, log, events=around.events, optimizing=around.optimizing)
    if earlier.checkpoint is not None:
        with terminal.waiting(f"reading {earlier.checkpoint.name}"):
            state = pipe.load_checkpoint(
                earlier.checkpoint,
                training.optimizer,
                training.scheduler,
                known=earlier.manifest,
            )
        told = json.loads((earlier.checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        training.restore(state, told["log_history"])
        if earlier.is_other:
            training.follow_config()
    saver = Saver(training, folder, Due(config, total, job.order.steps_per_epoch), terminal)
    recorder = TimelineRecorder(pipe, job.devices, title=job.header())
    parts.enter_context(stop.patient(lambda name: terminal.line(f"{name} {training.doing} …")))
    folder.start(config, log.history)
    parts.enter_context(terminal.logging_to(folder.path / "run.log"))
    return Run(job, training, saver, recorder, folder, terminal, stop, around.goes_on)


@contextlib.contextmanager
def kept_when_ended_early(run: Run) -> Iterator[None]:
    """Save what was trained when a signal or a failure ends the block; raise it on."""
    try:
        yield
    except Stopped as end:
        end.is_told = True
        run.recorder.take()
        run.recorder.write(run.folder)
        # What keeps it from being saved is worse than a signal, and raised in its place.
        run.terminal.line(_kept(run))
        raise
    except Exception as error:
        run.recorder.take()
        with contextlib.suppress(Exception):  # the same again: what failed is taken back
            run.training.settle()
        what = str(error).partition("\nhint:")[0]
        run.terminal.line(f"failed after step {run.training.done}: {what}")
        run.terminal.line(_kept_after_failure(run))
        run.recorder.write(run.folder)
        raise


def _kept_after_failure(run: Run) -> str:
    """Save the last step that was committed, if that can be, and say so."""
    try:
        return _kept(run)
    except Exception as error:  # what ended the run is what must be told
        return f"a checkpoint could not be saved: {error}".partition("\nhint:")[0]


def _kept(run: Run) -> str:
    """Save a checkpoint to go on from, and say how."""
    config, checkpoint = run.job.config, run.saver.save_to_go_on()
    if checkpoint is None:
        return "nothing was trained yet, so there is nothing to save"
    if run.goes_on is not None:
        return f"saved {checkpoint} · {run.goes_on} goes on"
    without = ""
    if config.overwrite_output_dir and "resume_from_checkpoint" not in config.model_fields_set:
        without = " without overwrite_output_dir"
    elif config.resume_from_checkpoint != "auto":
        without = " without resume_from_checkpoint"
    return f"saved {checkpoint} · the same command{without} goes on"


def _finish(run: Run, before: list[str]) -> None:
    """Write the result: the newest weights, or the best where that is wanted."""
    job, training, terminal = run.job, run.training, run.terminal
    run.saver.wait()
    run.recorder.take()
    take_best(run)
    weights = training.weights()
    if not run.stop.is_asked:
        after = sample_answers(job, training.pipe, terminal)
        terminal.answers(job.config.sample_prompts, before, after)
        training.log.text("answers", answers_text(job.config.sample_prompts, before, after))
    with terminal.waiting("saving"):
        run.recorder.write(run.folder)
        try:
            save_run(job, weights, run.folder, training.events.trainer_state())
        except OSError as error:
            raise RoundPipeError(
                f"output_dir: the result could not be saved: {error.strerror or error}: "
                f"{run.folder.shown}\nhint: make room and give the same command again"
            ) from error


def take_best(run: Run) -> None:
    """Put the weights of the best evaluation in place of the newest."""
    best, training = run.training.best, run.training
    if not run.job.config.load_best_model_at_end or best.step in (None, training.done):
        return
    folder = run.saver.best_path(best.step)
    try:
        training.pipe.load_checkpoint(folder)
    except ConfigError as error:  # nothing has changed
        run.terminal.line(f"warning: the newest weights are the result, not the best: {error}")
        return
    run.saver.is_over = True
    run.terminal.line(f"the result is the best: step {best.step}, evaluation loss {best.loss:.4g}")


def sample_answers(job: Job, pipe: RoundPipe, terminal: Terminal) -> list[str]:
    """Answers with the newest weights; what will take its time is said before."""
    prompts = job.config.sample_prompts
    if not prompts:
        return []
    answerer = Answerer(pipe, job.tokenizer)
    show = terminal.log if answerer.outlook(prompts).is_resident else terminal.line
    show(f"answering the sample prompts, {answerer.outlook_line(prompts)}")
    with terminal.waiting("answering the sample prompts"):
        return answerer.answers(prompts)
