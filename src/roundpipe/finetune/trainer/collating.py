"""Batches that a data collator of the user's makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.collate import cut_rows, cut_rows_evenly
from roundpipe.finetune.data.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# Offsets for attention kernels that read rows end to end; position_ids say the same to all others.
_OF_KERNELS = ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx")

# Arguments that hold nothing of a row beside its tokens, or nothing of rows at all.
_OF_ROWS = {"attention_mask", "input_ids", "labels", "output_router_logits"}


@dataclass(frozen=True)
class CollatorBatches:
    """``collator`` is called once for the rows of a step, with a list of their features.

    What it returns goes to the model as it is. Labels are the collator's.
    """

    collator: Callable[[list[dict[str, Any]]], Any]

    def batch(self, samples: Any, rows: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """One batch of ``rows``. Raises ConfigError for what is no batch of a causal LM."""
        made = self.collator([features_of(samples[i]) for row in rows for i in row])
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"data_collator returned a {type(made).__name__}"
                "\nhint: a dict with input_ids and labels"
            )
        batch = {name: value for name, value in made.items() if name not in _OF_KERNELS}
        if not isinstance(batch.get("labels"), torch.Tensor):
            raise ConfigError(
                f"data_collator made no labels: {', '.join(map(str, batch)) or 'nothing'}"
                "\nhint: DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of "
                "input_ids"
            )
        return batch

    def split(self, micro_batch_size: int | None) -> Any:
        """Rows of like length together where that can be, else in their order."""
        return _cut if micro_batch_size is None else _cut_evenly

    def tokens_in(self, batch: Mapping[str, Tensor]) -> int:
        """How many tokens of a batch are no padding, as far as it says."""
        mask = batch.get("attention_mask")
        return int(batch["labels"].numel() if mask is None or mask.dim() != 2 else mask.sum())


def features_of(sample: Any) -> dict[str, Any]:
    """A sample as collators take one: lists by name."""
    if isinstance(sample, Sample):
        return {"input_ids": sample.input_ids.tolist(), "labels": sample.labels.tolist()}
    return dict(sample)


def _cut(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
    return (cut_rows if _is_padded_right(kwargs) else _in_order)(args, kwargs, count)


def _cut_evenly(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
    return (cut_rows_evenly if _is_padded_right(kwargs) else _in_order)(args, kwargs, count)


def _is_padded_right(batch: Mapping[str, Any]) -> bool:
    """Whether rows can be sorted by length and made as narrow as their longest."""
    if batch.keys() - _OF_ROWS or "attention_mask" not in batch:
        return False
    mask = batch["attention_mask"]
    if mask.dim() != 2 or not mask.any(dim=1).all():
        return False
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _in_order(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Rows in ``count`` runs of about as many; what has no such dimension goes to each."""
    num_rows = len(kwargs["labels"])
    count = min(count, num_rows)
    edges = [num_rows * i // count for i in range(count + 1)]
    parts = [
        {name: _piece(value, start, stop, num_rows) for name, value in kwargs.items()}
        for start, stop in pairwise(edges)
    ]
    return [args] * count, parts


def _piece(value: Any, start: int, stop: int, num_rows: int) -> Any:
    is_cut = isinstance(value, torch.Tensor) and value.dim() and len(value) == num_rows
    return value[start:stop] if is_cut else value
