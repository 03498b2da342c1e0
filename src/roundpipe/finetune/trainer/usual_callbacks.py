"""The callbacks that a trainer has: those of transformers, and the user's among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import integrations
from transformers.trainer_callback import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
)

from roundpipe.finetune.output.terminal import in_notebook

if TYPE_CHECKING:
    from collections.abc import Sequence


def callbacks_for(arguments: Any, callbacks: Sequence[Any], patience: int | None) -> list[Any]:
    """The callbacks of a trainer in their order: those of transformers, then the user's.

    ``patience``: of a config that stops early.
    """
    shown: Any = PrinterCallback if arguments.disable_tqdm else _progress_callback()
    stops = [] if patience is None else [EarlyStoppingCallback(patience)]
    integrated: Any = integrations
    reporting = integrated.get_reporting_integration_callbacks(arguments.report_to)
    return [DefaultFlowCallback, *reporting, *callbacks, *stops, shown]


def _progress_callback() -> Any:
    if not in_notebook():
        return ProgressCallback
    from transformers.utils.notebook import NotebookProgressCallback  # noqa: PLC0415, of IPython

    return NotebookProgressCallback
