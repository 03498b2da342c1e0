"""The loss on held-out samples, as one mean over all their trained tokens.

No logits come to the host: of a batch only its loss does, and of long microbatches they are never
there all at once (`roundpipe.models.chunked_loss`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.run.retry import Splitting, lost_memory
from roundpipe.models.loss import count_trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from roundpipe.config import RoundPipeRunConfig


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation came to. ``loss``: mean per trained token, NaN without any.

    ``is_whole``: all batches were seen; else it was stopped.
    """

    loss: float
    tokens: int
    seconds: float = 0.0
    is_whole: bool = True


def evaluate(  # noqa: PLR0913 - what runs, what it runs on, and who may end it
    model: Callable[..., Any],
    batches: Iterable[Mapping[str, Tensor]],
    *,
    run_config: Callable[[int], RoundPipeRunConfig],
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int], None] = lambda _: None,
    splitting: Splitting | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Mean loss per trained token over ``batches``, whatever they are cut into.

    ``model`` is called with a batch's tensors, in evaluation mode already, and gives an output
    with ``.loss``, the mean over that batch: its newest weights are used and nothing of its
    training is changed. ``run_config`` is asked with the rows of a batch. ``should_stop`` is asked
    before each batch, ``tell`` told how many rows are done. Where a device's memory is short the
    batch is cut into more microbatches, which ``splitting`` remembers and ``say`` says. Blocks
    until all is done. Raises what makes a batch fail.
    """
    splitting = splitting or Splitting()
    total, tokens, done, started = 0.0, 0, 0, time.perf_counter()
    is_whole = True
    tell(done)
    for batch in batches:
        if should_stop():
            is_whole = False
            break
        rows = len(batch["input_ids"])
        if count := count_trained_tokens(batch["labels"]):
            config = replace(run_config(rows), loss_only=True, requires_grad=False)
            total += _loss(model, batch, config, splitting, say) * count
            tokens += count
        done += rows
        tell(done)
    loss = total / tokens if tokens else float("nan")
    return Evaluation(loss, tokens, time.perf_counter() - started, is_whole)


def _loss(
    model: Callable[..., Any],
    batch: Mapping[str, Tensor],
    config: RoundPipeRunConfig,
    splitting: Splitting,
    say: Callable[[str], None],
) -> float:
    rows = len(batch["input_ids"])
    while True:
        more = splitting.times(config.num_microbatch, rows)
        try:
            with torch.no_grad():
                output = model(**batch, roundpipe_run_config=replace(config, num_microbatch=more))
            return float(output.loss)
        except (RoundPipeError, torch.OutOfMemoryError) as error:
            if not lost_memory(error):
                raise
            splitting.halve(error, rows, count=more, say=say, what="evaluation")
