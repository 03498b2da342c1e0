"""The loss on held-out samples, as one mean over all their trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.finetune.data.collate import collate
from roundpipe.models.loss import count_trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roundpipe.finetune.data.encode import Sample

_MOST_LOGITS = 1 << 28  # of one call, 1 GiB in fp32


def evaluation_loss(
    forward: Callable[..., Any],
    samples: Sequence[Sample],
    *,
    batch_size: int,
    pad_token_id: int,
    vocabulary: int = 0,
) -> float:
    """Mean loss per trained token of ``samples``, whatever the batches they are cut into.

    ``forward`` is called with a batch's tensors under ``no_grad`` and gives an output with
    ``.loss``, the mean over that batch; nothing else of it is kept. Batches are at most
    ``batch_size`` samples, and fewer where logits over ``vocabulary`` entries would be too many to
    bring to the host at once. NaN without trained tokens.
    """
    total, tokens = 0.0, 0
    for part in _parts(samples, batch_size, _MOST_LOGITS // max(1, vocabulary)):
        batch = collate(part, pad_token_id)
        count = count_trained_tokens(batch["labels"])
        if count == 0:
            continue
        with torch.no_grad():
            total += float(forward(**batch).loss) * count
        tokens += count
    return total / tokens if tokens else float("nan")


def _parts(
    samples: Sequence[Sample], most_samples: int, most_tokens: int
) -> Iterator[Sequence[Sample]]:
    """Consecutive samples, each part at least one, padded to at most ``most_tokens``."""
    part: list[Sample] = []
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample.input_ids))
        if part and (len(part) == most_samples or longest * (len(part) + 1) > most_tokens):
            yield part
            part, longest = [], len(sample.input_ids)
        part.append(sample)
    if part:
        yield part
