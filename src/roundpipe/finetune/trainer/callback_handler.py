"""The callbacks that a trainer has: which, in what order, and how they are told of an event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import integrations
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from roundpipe.finetune.output.terminal import in_notebook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.finetune.trainer.familiar import Familiar


def handler_for(trainer: Familiar, callbacks: Sequence[Any]) -> CallbackHandler:
    """What calls a trainer's callbacks in their order: those of transformers around the user's."""
    shown: Any = PrinterCallback if trainer.args.disable_tqdm else _progress_callback()
    patience = trainer.config.early_stopping_patience
    stops = [] if patience is None else [EarlyStoppingCallback(patience)]
    integrated: Any = integrations
    reporting = integrated.get_reporting_integration_callbacks(trainer.args.report_to)
    handler: Any = CallbackHandler
    made: CallbackHandler = handler(
        [DefaultFlowCallback, *reporting, *callbacks, *stops, shown],
        trainer.model,
        trainer.processing_class,
        trainer.optimizer,
        trainer.lr_scheduler,
    )
    return made


def tell(trainer: Familiar, event: str, **more: Any) -> None:
    """Tell every callback of ``event`` (``on_…``), and take over what they want."""
    told = getattr(trainer.callback_handler, event)
    trainer.control = told(trainer.args, trainer.state, trainer.control, **more)


def is_watched(trainer: Familiar, event: str) -> bool:
    """Whether a callback does anything at an event."""
    own = getattr(TrainerCallback, event)
    return any(
        getattr(type(each), event, own) is not own for each in trainer.callback_handler.callbacks
    )


def _progress_callback() -> Any:
    if not in_notebook():
        return ProgressCallback
    from transformers.utils.notebook import NotebookProgressCallback  # noqa: PLC0415, of IPython

    return NotebookProgressCallback
