"""How much data a job goes over, found out cheaply: a few thousand rows tell the rest.

Rows are counted by their lines or by what a table says of itself, of a very large file by the bytes
that the first of them take. Lengths are told by the tokenizer where it is at hand without a
network, else by characters; of a large file only the first rows are tokenised, and the rest is
taken to be alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.rows import open_rows, read_rows
from roundpipe.finetune.model.source import locate_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

_DRAWN_BATCHES = 16  # at least, whose mean length stands for that of all
_MOST_DRAWN = 128  # rows of a batch; of larger ones fewer tell as much
_MOST_ROWS = 2000  # that are looked into, over all files
_CHARACTERS = 4.0  # of a token, where there is no tokenizer


@dataclass(frozen=True)
class DataSize:
    """``lengths``: tokens of the samples that were looked into, sorted and cut at max_length.

    ``is_exact``: every sample was tokenised; ``rows``: what an epoch goes over, where that is other
    than the samples: several are packed in one, or an entry has a weight. With packing lengths are
    those of rows.
    """

    samples: int
    lengths: tuple[int, ...]
    is_exact: bool
    rows: int | None = None

    def padded_length(self, batch_size: int, num_microbatch: int = 1) -> float:
        """Mean length of a batch's rows, each microbatch padded to its longest.

        Of a few batches drawn as training draws them and cut as it cuts them.
        """
        import numpy as np  # noqa: PLC0415

        from roundpipe.finetune.data.cut import best_sizes  # noqa: PLC0415
        from roundpipe.finetune.data.permutation import permuted  # noqa: PLC0415

        lengths = np.array(self.lengths, np.int64)
        total = len(lengths)
        passes = -(-_DRAWN_BATCHES * min(batch_size, total, _MOST_DRAWN) // total)
        padded = 0
        for number in range(passes):
            drawn = lengths[permuted(np.arange(total), total, f"forecast {number}")]
            for start in range(0, total, batch_size):
                longest_first = np.sort(drawn[start : start + batch_size])[::-1]
                sizes = best_sizes(longest_first, min(num_microbatch, len(longest_first)))
                padded += int((longest_first[np.cumsum(sizes) - sizes] * sizes).sum())
        return padded / (passes * total)

    def steps(self, config: TrainConfig) -> int:
        """Optimizer steps of the job."""
        rows = self.samples if self.rows is None else self.rows
        held_out = config.val_size or 0
        share = held_out if held_out < 1 else held_out / max(self.samples, 1)
        per_epoch = math.ceil(max(rows - round(share * rows), 1) / config.batch_size)
        return config.max_steps or max(1, math.ceil(config.num_train_epochs * per_epoch))


def measure_data(config: TrainConfig, tokenizer: Any | None) -> DataSize:
    """Count the samples of a config's dataset. Raises DataError for what cannot be read.

    ``tokenizer``: one of transformers; without it lengths are guessed by characters.
    """
    total = looked = 0
    seen = 0.0
    lengths: list[int] = []
    for entry in config.dataset:
        count = count_rows(entry)
        room = max(_MOST_ROWS - looked, _MOST_ROWS // 10)
        part = replace_entry(entry, min(room, count))
        found = _lengths(config.model_copy(update={"dataset": (part,)}), tokenizer)
        looked += min(room, count)
        usable = round(count * len(found) / max(min(room, count), 1))
        total += usable
        seen += usable * entry.weight
        lengths += found
    cut = sorted(min(length, config.max_length) for length in lengths)
    rows = max(1, round(seen))
    if config.packing and cut:
        import numpy as np  # noqa: PLC0415

        from roundpipe.finetune.data.packing import pack  # noqa: PLC0415

        packed = sorted(pack(np.array(cut), config.max_length).tokens.tolist())
        rows = max(1, round(rows * len(packed) / len(cut)))
        cut = packed
    is_exact = tokenizer is not None and looked >= total
    return DataSize(total, tuple(cut), is_exact, None if rows == total else rows)


def replace_entry(entry: DatasetEntry, most: int) -> DatasetEntry:
    """The entry with no more than so many rows."""
    return entry.model_copy(update={"max_samples": max(most, 1)})


def count_rows(entry: DatasetEntry) -> int:
    """Rows of an entry, at most ``max_samples``; about so many where its files are very large.

    Raises DataError.
    """
    source = open_rows(entry)
    first = next(iter(read_rows(replace_entry(entry, 1), source=source)))  # says what is wrong
    del first
    count = source.count()
    return count if entry.max_samples is None else min(count, entry.max_samples)


def _lengths(config: TrainConfig, tokenizer: Any | None) -> Sequence[int]:
    if tokenizer is not None:
        from roundpipe.finetune.data.dataset import load_dataset  # noqa: PLC0415, seconds

        changes = {"eval_dataset": None, "val_size": None, "dataset_prepared_path": None}
        found: list[int] = load_dataset(
            config.model_copy(update=changes), tokenizer
        ).samples.lengths.tolist()
        return found
    rows = read_rows(config.dataset[0], report=lambda problem, place, raw: None)
    return [max(1, round(_characters(row.values) / _CHARACTERS)) for row in rows]


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def local_tokenizer(model: str) -> Any | None:
    """The tokenizer of a model that is on this machine already; None where it is not."""
    try:
        source = locate_model(model)
    except ConfigError:
        return None
    if source.is_hub and not _is_cached(source):
        return None
    from roundpipe.finetune.model.from_transformers import load_tokenizer  # noqa: PLC0415, torch

    try:
        return load_tokenizer(source)
    except ConfigError:
        return None


def _is_cached(source: ModelSource) -> bool:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    try:
        found = [
            try_to_load_from_cache(source.location, name, revision=source.revision)
            for name in ("tokenizer.json", "tokenizer.model")
        ]
    except ValueError:  # no such id could be
        return False
    return any(isinstance(path, str) for path in found)
