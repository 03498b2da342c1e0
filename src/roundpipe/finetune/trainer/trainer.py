"""`RoundPipeTrainer`: a trainer by the names that scripts for transformers and TRL know.

It is the loop of ``roundpipe train`` with other words around it: its steps, checkpoints, retries
and its care for what was trained are those. What it calls callbacks with, and when, is as
transformers' Trainer has it (`callbacks.py`). What it has not raises by name (`refusals.py`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import LOG_FILE
from roundpipe.finetune.output.run_folder import claim
from roundpipe.finetune.output.sample import answer
from roundpipe.finetune.run.result import show_usage
from roundpipe.finetune.run.signals import ending_a_script, listening
from roundpipe.finetune.run.steps import (
    Around,
    kept_when_ended_early,
    run_steps,
    sample_answers,
    started,
    take_best,
)
from roundpipe.finetune.run.training import Optimizing, make_optimizer
from roundpipe.finetune.trainer.arguments import read_arguments
from roundpipe.finetune.trainer.callback_handler import handler_for, tell
from roundpipe.finetune.trainer.callbacks import CallbackEvents
from roundpipe.finetune.trainer.epochs import Epochs
from roundpipe.finetune.trainer.evaluating import Evaluating, speed
from roundpipe.finetune.trainer.familiar import Familiar
from roundpipe.finetune.trainer.folder import (
    compare_content,
    judge_for,
    place_to_resume,
    save_as_run,
    save_to,
)
from roundpipe.finetune.trainer.loading import model_given, num_matrix_weights
from roundpipe.finetune.trainer.refusals import (
    absent,
    refuse_arguments,
    refuse_launcher,
    refuse_overridden,
)
from roundpipe.finetune.trainer.setting_up import Wishes, set_up
from roundpipe.finetune.trainer.showing import LinesOnly
from roundpipe.finetune.trainer.stand_ins import OneProcess, ShownBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.finetune.run.steps import Run


class RoundPipeTrainer(Familiar):
    """Fine-tune a causal LM that is larger than its devices, by the names of TRL's ``SFTTrainer``.

    ``model``: a folder or hub id, a model of transformers (also under peft) in host memory, or a
    `RoundPipe`. ``args``: ``TrainingArguments``, an ``SFTConfig`` (whose own defaults count), a
    dict of settings by their names or ours, or a ``TrainConfig``. Datasets: of `datasets`, lists of
    dicts, a path or hub id; ``eval_dataset`` may be a dict of several. ``processing_class``: the
    tokenizer; None: the model's. ``compute_loss_func(outputs, labels, num_items_in_batch)`` is
    called for each microbatch, and what it returns is summed. ``callbacks``: instances or classes
    of ``TrainerCallback``. ``optimizers``: (optimizer, scheduler) over the model's parameters; it
    is made again over their masters. ``peft_config``, ``quantization_config``: train an adapter, on
    weights in 4 bits. ``formatting_func(example)`` returns a text. ``environment``: the process's,
    for choosing devices and the cache of tokens.

    Reads data and model and puts it on its devices at once. ``close()`` or ``with`` ends it.
    Attributes are those of transformers' Trainer; ``model`` is the `RoundPipe`. Raises ConfigError,
    by name and with a way out, for what cannot be used or is not supported.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - TRL's names and order
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable[[list[dict[str, Any]]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = (None, None),
        *,
        peft_config: Any = None,
        quantization_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        refuse_arguments(others)
        model = model_given(model)
        refuse_overridden(type(self), RoundPipeTrainer)
        told = read_arguments(
            args,
            model,
            peft_config=peft_config,
            quantization_config=quantization_config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            environment=environment,
        )
        self.args = told.arguments
        # transformers' arguments tie evaluations to checkpoints, ours save the best by themselves.
        self.keeps_best = told.config.load_best_model_at_end and not told.is_theirs
        refuse_launcher(self.args)
        self._terminal = LinesOnly()
        for note in told.notes:
            self._terminal.line(note)
        wishes = Wishes(
            model=model,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            optimizers=optimizers,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )
        with contextlib.ExitStack() as parts:
            self._made = set_up(wishes, told, self._terminal, parts, environment=environment)
            self._closer = weakref.finalize(self, parts.pop_all().close)
        self._closer.atexit = False  # devices have ended by then
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator, self.compute_loss_func = data_collator, compute_loss_func
        self._begin(list(callbacks or ()), processing_class)

    def _begin(self, callbacks: list[Any], processing_class: Any) -> None:
        """Be what scripts see of a trainer, and tell ``init_end``."""
        job, self.model = self._made.job, self._made.pipe
        self.config = job.config
        self.processing_class = processing_class if processing_class is not None else job.tokenizer
        size = job.config.batch_size // self.args.gradient_accumulation_steps
        self.train_batch_size = max(1, size)
        self.num_matrix_weights = num_matrix_weights(job.model)
        device = job.devices[0].torch_device
        self.accelerator = OneProcess(device, write=self._terminal.line)
        self.hub_model_id: str | None = None
        self._optimizing = self._made.optimizing
        self.lr_scheduler = None if self._optimizing is None else self._optimizing.scheduler
        samples = job.dataset.samples
        self.train_batches = ShownBatches(job, samples, self.train_batch_size, self.train_dataset)
        self._run: Run | None = None
        self.is_evaluation_whole = True  # False: Ctrl-C came meanwhile
        self._ignored_keys: list[str] | None = None
        per_device: int = self.args.per_device_eval_batch_size
        self._evaluating = Evaluating(job, self.model, max(1, per_device * len(job.devices)))
        self.callback_handler = handler_for(self, callbacks)
        self.control = TrainerControl()
        self.state = TrainerState()
        tell(self, "on_init_end")

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as ``args`` say; ``resume_from_checkpoint``: True, or a checkpoint's folder.

        Without it training begins anew with the weights as they are, and checkpoints of an earlier
        run in ``output_dir`` are replaced. Blocks until it ends. Returns the steps made, their mean
        loss and ``metrics``; model files are written by `save_model`.

        Raises KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM where the script has no
        handler of its own, and what made a step fail, when a checkpoint was saved; the trainer may
        be used further.
        """
        self._ready()
        if trial is not None:
            raise absent("hyperparameter_search")
        self._ignored_keys = ignore_keys_for_eval
        job, resume = self._made.job, place_to_resume(resume_from_checkpoint, self.config)
        with contextlib.ExitStack() as parts:
            parts.enter_context(ending_a_script())
            stop = parts.enter_context(listening())
            held = claim(self.config, self._terminal.counting, judged=judge_for(resume))
            folder = parts.enter_context(held)
            for line in folder.earlier.lines:
                self._terminal.line(line)
            compare_content(job, folder.earlier, self._terminal.line)
            torch.manual_seed(self.config.seed)
            sizes = (self.train_batch_size, self.args.gradient_accumulation_steps)
            events = CallbackEvents(self, Epochs(job.order, *sizes))
            around = Around(
                folder,
                self._terminal,
                stop,
                events,
                self._optimizer_of_run(),
                goes_on="train(resume_from_checkpoint=True)",
                keeps_log=False,
            )
            answers = functools.partial(sample_answers, job, self.model, self._terminal)
            before = answers()
            parts.callback(setattr, self, "_run", None)
            self._run = run = started(job, self.model, around, parts)
            with kept_when_ended_early(run):
                run_steps(run)
                metrics = self._finish(run, events)
                self._terminal.answers(self.config.sample_prompts, before, answers())
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _finish(self, run: Run, events: CallbackEvents) -> dict[str, float]:
        run.saver.wait()
        run.recorder.take()
        run.recorder.write(run.folder)
        metrics = events.finish()
        take_best(run)
        events.end()
        return metrics

    def _optimizer_of_run(self) -> Optimizing:
        """The optimizer, which outlives a run, and its own scheduler, if it has one."""
        if self._optimizing is None:
            self._optimizing = Optimizing(make_optimizer(self.config, self.model))
        return self._optimizing

    # ---- evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Give the loss of the newest weights on ``eval_dataset``, by default the trainer's own.

        The loss is the mean over all trained tokens. Of several datasets, a dict, each has its own,
        ``eval_NAME_loss``. ``ignore_keys`` are of outputs, of which none comes here. Callbacks are
        told. Blocks until done. Raises ConfigError where there is nothing to evaluate on.
        """
        del ignore_keys
        self._ready()
        found = self._made.eval_samples(eval_dataset)
        if list(found) == [""]:
            return self._evaluate(found[""], metric_key_prefix)
        metrics: dict[str, float] = {}
        for name, samples in found.items():
            metrics |= self._evaluate(samples, f"{metric_key_prefix}_{name}")
        return metrics

    def evaluate_now(self) -> dict[str, float]:
        """Evaluate because callbacks want it, through whatever a subclass makes of `evaluate`."""
        self.is_evaluation_whole = True
        return self.evaluate(ignore_keys=self._ignored_keys)

    def best_metric_name(self, metrics: Mapping[str, float]) -> str:
        """What the best is told by. Raises ConfigError where it was not measured."""
        name = str(self.args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"metric_for_best_model: {name} was not measured\nhint: one of {', '.join(metrics)}"
            )
        return name

    def _evaluate(self, samples: Any, prefix: str) -> dict[str, float]:
        start = time.time()
        self.callback_handler.eval_dataloader = ShownBatches(
            self._made.job, samples, self._evaluating.rows, self.eval_dataset
        )
        found = self._evaluating.loss_on(
            samples,
            run=self._run,
            tell=functools.partial(tell, self, "on_prediction_step"),
            say=self._terminal.line,
        )
        if not found.is_whole:
            self.is_evaluation_whole = False
            return {}
        metrics: dict[str, float] = {f"{prefix}_loss": found.loss}
        steps = math.ceil(len(samples) / self._evaluating.rows)
        metrics |= speed(prefix, start, num_samples=len(samples), num_steps=steps)
        self.log(metrics)
        tell(self, "on_evaluate", metrics=metrics)
        return metrics

    # ---- results

    def save_model(
        self, output_dir: str | Path | None = None, _internal_call: bool = False
    ) -> None:
        """Write the newest weights, an adapter's alone where one is trained, and the tokenizer.

        Into ``output_dir``, by default that of ``args``, which is a finished run's folder then,
        with its model card. Stock transformers and peft open it. Blocks until it is on the disk.
        """
        self._ready()
        own = Path(self.config.output_dir).expanduser()
        folder = own if output_dir is None else Path(output_dir).expanduser()
        is_own = folder.absolute() == own.absolute() and (own / LOG_FILE).is_file()
        if is_own and self._run is None:
            save_as_run(self._made.job, self.model, self._state_to_save())
            show_usage(self._made.job, self._terminal)
        else:
            save_to(folder, self._made.job, self.model)

    def chat(
        self, prompt: str | Sequence[Any], *, max_new_tokens: int = 256, **sampling: Any
    ) -> Any:
        """Let the newest weights answer a prompt (a text, or messages), or a list of prompts.

        Returns a text, or a list of them. Greedy unless ``sampling`` says otherwise, by the names
        of transformers' ``generate``. Training may go on afterwards. Blocks until all is answered.
        """
        self._ready()
        is_one = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], dict))
        prompts: list[Any] = [prompt] if is_one else list(prompt)
        tokenizer = self._made.job.tokenizer
        answers = answer(self.model, tokenizer, prompts, max_new_tokens=max_new_tokens, **sampling)
        return answers[0] if is_one else answers

    # ---- its end

    def end(self) -> None:
        """End it, as transformers' Trainer is ended; see `close`."""
        self.close()

    def close(self) -> None:
        """Free devices and threads; a model that was given stays usable. Idempotent."""
        if found := self._closer.detach():  # called, it would do nothing once Python is ending
            found[1]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> None:
        if not self._closer.alive:
            raise ConfigError("the trainer is closed\nhint: make a new one")
