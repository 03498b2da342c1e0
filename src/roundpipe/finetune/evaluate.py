"""The loss on held-out samples, as one mean over all their trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.finetune.collate import collate
from roundpipe.models.loss import count_trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.finetune.encode import Sample


def evaluation_loss(
    forward: Callable[..., Any],
    samples: Sequence[Sample],
    *,
    batch_size: int,
    pad_token_id: int,
) -> float:
    """Mean loss per trained token of ``samples``, whatever the batches they are cut into.

    ``forward`` is called with a batch's tensors under ``no_grad`` and gives an output with
    ``.loss``, the mean over that batch; nothing else of it is kept. NaN without trained tokens.
    """
    total, tokens = 0.0, 0
    for start in range(0, len(samples), batch_size):
        batch = collate(samples[start : start + batch_size], pad_token_id)
        count = count_trained_tokens(batch["labels"])
        if count == 0:
            continue
        with torch.no_grad():
            total += float(forward(**batch).loss) * count
        tokens += count
    return total / tokens if tokens else float("nan")
