"""``roundpipe merge RUN``: an adapter and its base become one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.signals import leave_at_once, listening
from roundpipe.finetune.use.request import read_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.use.request import Request

USAGE = "roundpipe merge RUN [output_dir=FOLDER] [dtype=bf16] [base=original]"
_OPTIONS = ("base", "export_dir")  # the second is LLaMA-Factory's word for output_dir


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command; a signal leaves nothing half written.

    Raises ConfigError, PlanError where the disk has no room, and `Stopped`.
    """
    with listening(leave_at_once) as stop:
        request = read_request(arguments, options=_OPTIONS, environment=environment, usage=USAGE)
        terminal = Terminal()
        for line in request.notes:
            terminal.line(line)
        _merge(request, terminal, environment)
        stop.check()
    return 0


def _merge(request: Request, terminal: Terminal, environment: Mapping[str, str]) -> None:
    with terminal.waiting("starting torch"):
        from roundpipe.finetune.use.merge import merge  # noqa: PLC0415 (torch)
        from roundpipe.finetune.use.merge_wish import merge_wish_of  # noqa: PLC0415
        from roundpipe.finetune.use.subject import find_subject  # noqa: PLC0415
    subject = find_subject(request.given, terminal, base=request.base)
    wish = merge_wish_of(request, subject)
    # The dtype that is said is what is saved; the model runs as it was trained.
    trained = "auto" if subject.config is None else subject.config.dtype
    settings = request.settings.model_copy(update={"dtype": trained})
    merge(subject, wish, settings, terminal, environment=environment)
