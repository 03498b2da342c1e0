"""Samples as padded tensors, and the order in which they are trained."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from roundpipe.finetune.data.encode import IGNORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roundpipe.finetune.data.encode import Sample


def collate(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, each int64 [samples, longest].

    Padding stands on the right, with mask 0 and label -100; a token that merely equals
    ``pad_token_id`` is no padding.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    shape = (len(samples), max(lengths, default=0))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        input_ids[i, :length] = torch.tensor(sample.input_ids, dtype=torch.int64)
        labels[i, :length] = torch.tensor(sample.labels, dtype=torch.int64)
        attention_mask[i, :length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def batches(num_samples: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The samples of each optimizer step of one epoch, every sample once, the last batch short.

    The order hangs on ``seed`` and ``epoch`` alone, neither on the global random state nor on how
    often it was asked for.
    """
    order = list(range(num_samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]
