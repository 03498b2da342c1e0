"""How much data a job goes over, found out cheaply: a few thousand rows tell the rest.

Rows are counted by their lines. Lengths are told by the tokenizer where it is at hand without a
network, else by characters; of a large file only the first rows are tokenised, and the rest is
taken to be alike.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.rows import read_rows
from roundpipe.finetune.model.source import locate_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

_MOST_ROWS = 2000  # that are looked into, over all files
_CHARACTERS = 4.0  # of a token, where there is no tokenizer
_BLOCK = 1 << 20


@dataclass(frozen=True)
class DataSize:
    """``lengths``: tokens of the samples that were looked into, sorted and cut at max_length.

    ``is_exact``: every sample was tokenised.
    """

    samples: int
    lengths: tuple[int, ...]
    is_exact: bool

    def padded_length(self, batch_size: int) -> float:
        """Mean length of a batch, padded to its longest sample.

        Of n samples, B drawn without repetition all lie among the first i with probability
        C(i, B) / C(n, B), which falls from i to i - 1 by a factor of (i - B) / i.
        """
        count = len(self.lengths)
        drawn = min(batch_size, count)
        mean, within = 0.0, 1.0
        for at in range(count, 0, -1):
            below = within * max(at - drawn, 0) / at
            mean += self.lengths[at - 1] * (within - below)
            within = below
        return mean

    def steps(self, config: TrainConfig) -> int:
        """Optimizer steps of the job."""
        from roundpipe.finetune.data.length import RunLength  # noqa: PLC0415, torch

        held_out = config.val_size or 0
        count = held_out * self.samples if held_out < 1 else held_out
        return RunLength.of(config, max(self.samples - round(count), 1)).total_steps


def measure_data(config: TrainConfig, tokenizer: Any | None) -> DataSize:
    """Count the samples of a config's dataset. Raises DataError for what cannot be read.

    ``tokenizer``: one of transformers; without it lengths are guessed by characters.
    """
    total = looked = 0
    lengths: list[int] = []
    for entry in config.dataset:
        count = count_rows(entry)
        room = max(_MOST_ROWS - looked, _MOST_ROWS // 10)
        part = replace_entry(entry, min(room, count))
        found = _lengths(config.model_copy(update={"dataset": (part,)}), tokenizer)
        looked += min(room, count)
        total += round(count * len(found) / max(min(room, count), 1))
        lengths += found
    cut = sorted(min(length, config.max_length) for length in lengths)
    return DataSize(total, tuple(cut), tokenizer is not None and looked >= total)


def replace_entry(entry: DatasetEntry, most: int) -> DatasetEntry:
    """The entry with no more than so many rows."""
    return entry.model_copy(update={"max_samples": max(most, 1)})


def count_rows(entry: DatasetEntry) -> int:
    """Rows of a file, by its lines where it has one a line; at most ``max_samples``."""
    path = Path(entry.path).expanduser()
    first = next(iter(read_rows(replace_entry(entry, 1))))  # says what is wrong with the file
    del first
    if ".json" in [suffix.lower() for suffix in path.suffixes]:
        count = sum(1 for _ in read_rows(entry, on_bad_line=lambda problem: None))
    else:
        count = sum(1 for line in _blocks_of_lines(path) if line.strip())
    return count if entry.max_samples is None else min(count, entry.max_samples)


def _blocks_of_lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        yield from file


def _lengths(config: TrainConfig, tokenizer: Any | None) -> Sequence[int]:
    if tokenizer is not None:
        from roundpipe.finetune.data.dataset import load_dataset  # noqa: PLC0415, seconds

        plain = config.model_copy(update={"eval_dataset": None, "val_size": None})
        return [len(sample.input_ids) for sample in load_dataset(plain, tokenizer).samples]
    rows = (row for _, row in read_rows(config.dataset[0], on_bad_line=lambda problem: None))
    return [max(1, round(_characters(row) / _CHARACTERS)) for row in rows]


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
