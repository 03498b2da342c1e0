"""Samples as padded tensors, and how a batch of them is cut into microbatches.

A row is one sample with its ``attention_mask``, or several packed ones without: their
``position_ids`` begin again at 0, from which the models of transformers build a mask that keeps
them apart. In a packed row each token of padding stands at position 0, a sample of its own that
no other token sees and nobody learns.

A step is the same whichever microbatch a row goes to: its loss is a sum over tokens, divided once.
So rows of like length go together (`cut.py`), and a microbatch is only as wide as its longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.cut import best_sizes, even_sizes
from roundpipe.finetune.data.samples import IGNORED, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


def collate(
    rows: Sequence[Sample | Sequence[Sample]], pad_token_id: int, *, packed: bool = False
) -> dict[str, Tensor]:
    """One batch: ``input_ids``, ``labels`` and ``attention_mask``, each int64 [rows, longest row].

    ``packed``: rows of several samples, with ``position_ids`` in place of the mask. A bare sample
    is a row. Padding stands on the right, with label -100; a token that merely equals
    ``pad_token_id`` is no padding. The first token of every sample has the label -100: nothing
    before it in its sample predicts it.
    """
    filled = [[row] if isinstance(row, Sample) else list(row) for row in rows]
    assert packed or all(len(row) == 1 for row in filled), "several samples in a row: packed=True"
    lengths = [sum(len(sample.input_ids) for sample in row) for row in filled]
    shape = (len(filled), max(lengths, default=0))
    input_ids = np.full(shape, pad_token_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    beside = np.zeros(shape, np.int64)  # the mask, or the positions
    for at, row in enumerate(filled):
        start = 0
        for sample in row:
            stop = start + len(sample.input_ids)
            input_ids[at, start:stop] = sample.input_ids
            labels[at, start:stop] = sample.labels
            labels[at, start : start + 1] = IGNORED
            beside[at, start:stop] = np.arange(stop - start) if packed else 1
            start = stop
    names = ("input_ids", "position_ids" if packed else "attention_mask", "labels")
    return dict(zip(names, map(torch.from_numpy, (input_ids, beside, labels)), strict=True))


def tokens_in(batch: dict[str, Tensor]) -> int:
    """How many tokens of a batch are no padding."""
    return int(_lengths(batch).sum())


def cut_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Deal the rows of a batch of `collate` to ``count`` microbatches so that they are alike.

    A ``split_input`` of ``RoundPipeRunConfig``. Rows go longest first, neighbours together, each
    microbatch padded to its own longest; the sum of their squared sizes in tokens is the least
    there is, so that long rows stand alone and little is padded. None is larger than the longest
    row times rows / ``count``. Depends on the lengths alone; fewer microbatches if rows are fewer.
    """
    return _cut(args, kwargs, count, is_even=False)


def cut_rows_evenly(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Deal rows as `cut_rows` does, with as many rows in one microbatch as in another.

    For a ``micro_batch_size`` that somebody chose.
    """
    return _cut(args, kwargs, count, is_even=True)


def _cut(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, *, is_even: bool
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    if args or not {"input_ids", "labels"} <= kwargs.keys():
        raise ConfigError(
            f"not a batch of samples: {len(args)} arguments and {', '.join(kwargs) or 'none'} by "
            "name\nhint: input_kwargs=collate(samples, pad_token_id)"
        )
    lengths = _lengths(kwargs)
    longest_first = np.argsort(-lengths, kind="stable")
    count = min(count, len(lengths))
    sizes = (even_sizes if is_even else best_sizes)(lengths[longest_first], count)
    ends = np.cumsum(sizes)
    parts = []
    for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
        rows = torch.from_numpy(longest_first[start:end])
        width = int(lengths[rows[0]])
        parts.append({name: _piece(value, rows, width) for name, value in kwargs.items()})
    return [()] * count, parts


def _piece(value: Any, rows: Tensor, width: int) -> Any:
    return value[rows, :width] if isinstance(value, torch.Tensor) and value.dim() == 2 else value


def _lengths(batch: dict[str, Tensor]) -> NDArray[np.int64]:
    """Tokens of each row without the padding behind them.

    Packed, padding is a run of zeros after a position 0: the last of a row's samples, were it one
    token long, would look like it, and would not be learned either.
    """
    mask = batch.get("attention_mask")
    if mask is not None:
        return np.asarray(mask.sum(dim=1), np.int64)
    positions = np.asarray(batch["position_ids"])
    last = positions.shape[1] - np.argmax(positions[:, ::-1] > 0, axis=1)
    return np.asarray(np.where(positions.any(axis=1), last, positions.shape[1]), np.int64)


def split_of(micro_batch_size: int | None) -> Any:
    """The ``split_input`` for a config's ``micro_batch_size``."""
    return cut_rows if micro_batch_size is None else cut_rows_evenly
