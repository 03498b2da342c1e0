"""A Trainer's model, data and devices, from what its constructor was given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, ModelError
from roundpipe.finetune.run.own_loss import OwnLoss
from roundpipe.finetune.run.prepare import Given, Read, prepare
from roundpipe.finetune.run.steps import wrapped_for_run
from roundpipe.finetune.trainer.datasets import Preparing
from roundpipe.finetune.trainer.loading import loaded, method_of
from roundpipe.finetune.trainer.optimizers import names_of, over_masters
from roundpipe.finetune.trainer.router_loss import (
    WithRouterLoss,
    no_router_loss,
    set_router_loss,
)
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping

    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.prepare import Job, Loaded
    from roundpipe.finetune.run.training import Optimizing
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.trainer.datasets import Data
    from roundpipe.finetune.trainer.told import Told


@dataclass(frozen=True)
class Wishes:
    """The constructor's arguments that are no settings."""

    model: Any
    data_collator: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    compute_loss_func: Callable[..., Any] | None = None
    optimizers: Any = (None, None)
    peft_config: Any = None
    formatting_func: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Parts:
    """What a Trainer trains with. ``optimizing`` None: what the config says.

    ``preparing`` makes samples of further datasets.
    """

    job: Job
    pipe: RoundPipe
    data: Data
    preparing: Preparing
    optimizing: Optimizing | None

    def eval_samples(self, given: Any) -> dict[str, Any]:
        """Samples by the name of their dataset, ``""`` without one: what ``evaluate`` is to score.

        ``given``: None for those of the constructor, a name among them, or a dataset, or a dict of
        several. Raises ConfigError where there are none.
        """
        own = self.data.evals
        if given is None:
            found = own
        elif isinstance(given, str) and given in own:
            found = {"": own[given]}
        else:
            found = self.preparing.evaluation(given)
        if not found:
            raise ConfigError("there is nothing to evaluate on\nhint: eval_dataset=…")
        return found


def set_up(
    wishes: Wishes,
    told: Told,
    terminal: Terminal,
    until: contextlib.ExitStack,
    *,
    environment: Mapping[str, str] | None,
) -> Parts:
    """Read the data, load the model and put it on its devices, until ``until`` ends.

    Shows what it does; blocks until all is there. Raises ConfigError for what cannot be used.
    """
    model, config = wishes.model, told.config
    _require_fitting(wishes, config)
    given: Loaded | None = None
    if not isinstance(model, str):
        is_ready = wishes.peft_config is None
        given = loaded(model, config, terminal.line, is_ready=is_ready)
        if is_ready:
            config = config.model_copy(update={"finetuning_type": method_of(given.base.model)})
    tokenizer = tokenizer_from(wishes.processing_class)
    if tokenizer is None and given is not None:
        _require_place(given)
    read: dict[str, Any] = {}

    def read_data(config: TrainConfig, tokenizer: Any, counting: Any) -> Read:
        preparing = Preparing(
            replace(told, config=config),
            tokenizer,
            formatting_func=wishes.formatting_func,
            data_collator=wishes.data_collator,
            counting=counting,
            environment=environment,
        )
        data = preparing.data(wishes.train_dataset, wishes.eval_dataset)
        read.update(preparing=preparing, data=data)
        return Read(data.config, data.dataset, data.order, data.collating)

    function = wishes.compute_loss_func or _smoothing(told.arguments)
    how = Given(
        tokenizer=tokenizer,
        data=read_data,
        model=given,
        lora=wishes.peft_config,
        loss=None if function is None else OwnLoss(function),
    )
    job = until.enter_context(prepare(config, terminal, environment=environment, given=how))
    is_wrapped = isinstance(model, RoundPipe)
    job, has_router_loss = _with_router_loss(job, told, is_wrapped=is_wrapped)
    names = names_of(job.model)
    pipe = model if is_wrapped else _wrapped(job, until, has_router_loss)
    optimizing = over_masters(wishes.optimizers, pipe, names)
    return Parts(job, pipe, read["data"], read["preparing"], optimizing)


def _with_router_loss(job: Job, told: Told, *, is_wrapped: bool) -> tuple[Job, bool]:
    """The job with the loss of a mixture's router where args add it, and whether there is one."""
    if not told.adds_router_loss or job.loss is not None:  # which sees the model's logits alone
        return job, False
    wanted = getattr(told.arguments, "router_aux_loss_coef", None)
    if not set_router_loss(job.model, wanted, is_wrapped=is_wrapped):
        return job, False
    return replace(job, batches=WithRouterLoss(job.batches)), True


def _wrapped(job: Job, until: contextlib.ExitStack, has_router_loss: bool) -> RoundPipe:
    try:
        return until.enter_context(wrapped_for_run(job))
    except ModelError as error:
        if has_router_loss and "output_router_logits" in str(error):
            raise no_router_loss(job.model, error) from error
        raise


def _require_fitting(wishes: Wishes, config: TrainConfig) -> None:
    if not isinstance(wishes.model, RoundPipe):
        return
    for what, is_given in (
        ("peft_config", wishes.peft_config is not None),
        ("neftune_noise_alpha", config.neftune_noise_alpha is not None),
    ):
        if is_given:
            raise ConfigError(
                f"{what} changes the model, and it is in a RoundPipe already"
                "\nhint: model=MODEL, before it is wrapped, or its name"
            )


def tokenizer_from(processing_class: Any) -> Any:
    """The tokenizer in it, None where none is given. Raises ConfigError for what has none.

    Of a processor, which reads images or sound too, its tokenizer: text alone is trained.
    """
    if processing_class is None:
        return None
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, which has no tokenizer"
            "\nhint: processing_class=AutoTokenizer.from_pretrained(…), or leave it out"
        )
    return tokenizer


def _require_place(given: Loaded) -> None:
    """Raise ConfigError where nobody knows what tokenizer a model has."""
    if not given.source.is_hub and not Path(given.source.location).is_dir():
        raise ConfigError(
            "processing_class is not given, and the model does not say where it came from"
            "\nhint: processing_class=AutoTokenizer.from_pretrained(…)"
        )


def _smoothing(arguments: Any) -> Callable[..., Any] | None:
    """transformers' own loss with smoothed labels, where args ask for it."""
    if not arguments.label_smoothing_factor:
        return None
    from transformers.trainer_pt_utils import LabelSmoother  # noqa: PLC0415, takes a second

    smoother = LabelSmoother(epsilon=arguments.label_smoothing_factor)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return smoother(outputs, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)

    return loss
