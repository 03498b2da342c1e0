"""The dataset of a run: files to samples, with an account of what became of every row.

Rows that teach nothing are left out and counted; if that is most of them the run stops before it
trains on nothing. What this returns depends on the files, the tokenizer and the config alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.encode import Sample, encode, has_doubled_bos, prepare, tokenize
from roundpipe.finetune.data.marked import marked_sample
from roundpipe.finetune.data.rows import read_rows
from roundpipe.finetune.data.shapes import map_columns, shape_of, unused_columns
from roundpipe.finetune.data.template import Rendered, use_chat_template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roundpipe.finetune.data.shapes import Tokens
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

__all__ = [
    "Dataset",
    "Sample",
    "Stats",
    "encode",
    "load_dataset",
    "marked_sample",
    "read_rows",
]

_CHUNK = 256  # rows that go to the tokenizer at once
_MOST = 0.5  # share of rows without a trained token from which the run stops


@dataclass(frozen=True, slots=True)
class Stats:
    """What a list of samples holds; lengths in tokens."""

    samples: int
    tokens: int
    trained: int
    median_length: int
    p90_length: int
    max_length: int

    @property
    def trained_share(self) -> float:
        """Trained tokens over all tokens."""
        return self.trained / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Account:
    """What became of the rows that were read."""

    rows: int = 0
    cut: int = 0
    dropped: int = 0
    lost: int = 0
    doubled_bos: int = 0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples to train on, samples to evaluate on, and the account of both."""

    samples: list[Sample]
    eval_samples: list[Sample]
    stats: Stats
    eval_stats: Stats
    account: Account
    limit: int

    def describe(self) -> list[str]:
        """Lines for people: sizes, lengths, and whatever was cut, left out or odd."""
        stats, account = self.stats, self.account
        lines = [
            f"{stats.samples:,} samples, {stats.tokens:,} tokens, "
            f"{100 * stats.trained_share:.0f} % trained",
            f"lengths: half up to {stats.median_length:,} tokens, 90 % up to "
            f"{stats.p90_length:,}, longest {stats.max_length:,} (max_length {self.limit:,})",
        ]
        if self.eval_samples:
            lines.append(
                f"evaluation: {self.eval_stats.samples:,} samples, {self.eval_stats.trained:,} "
                "trained tokens"
            )
        counted = (
            (account.cut, f"cut at max_length {self.limit:,}"),
            (account.dropped, f"left out, longer than max_length {self.limit:,}"),
            (account.lost, "left out, no trained token"),
            (account.doubled_bos, "start with the begin token twice: the text or template has one"),
            (len(account.skipped), f"skipped, the first: {''.join(account.skipped[:1])}"),
        )
        warnings = [f"{count:,} of {account.rows:,} {what}" for count, what in counted if count]
        return [*lines, *(f"warning: {warning}" for warning in warnings), *account.notes]


def load_dataset(
    config: TrainConfig, tokenizer: Any, *, progress: Callable[[int], None] | None = None
) -> Dataset:
    """Read, tokenise, mask, cut and split what ``config`` names; blocks until all of it is there.

    Sets the tokenizer's chat template if the config names one. ``progress`` is called with the
    number of rows so far. Raises DataError for a file or line that cannot be used and where too few
    rows would teach anything, ConfigError for a template that cannot be trained with.
    """
    use_chat_template(tokenizer, config.chat_template)
    account = Account()
    samples = _load(config.dataset, config, tokenizer, account, progress)
    held_out: list[Sample] = []
    if config.eval_dataset is not None:
        held_out = _load(config.eval_dataset, config, tokenizer, account, progress)
    elif config.val_size is not None:
        samples, held_out = _split(samples, config)
    if not tokenizer.chat_template and not config.train_on_prompt:
        account.notes.append("no chat template: prompt and answer are joined as they stand")
    return Dataset(
        samples, held_out, stats_of(samples), stats_of(held_out), account, config.max_length
    )


def stats_of(samples: Sequence[Sample]) -> Stats:
    """Counts and length percentiles (nearest rank) of a list of samples."""
    lengths = sorted(len(sample.input_ids) for sample in samples)

    def rank(share: float) -> int:
        return lengths[max(0, math.ceil(share * len(lengths)) - 1)] if lengths else 0

    return Stats(
        samples=len(lengths),
        tokens=sum(lengths),
        trained=sum(sample.num_trained for sample in samples),
        median_length=rank(0.5),
        p90_length=rank(0.9),
        max_length=lengths[-1] if lengths else 0,
    )


def _load(
    entries: Sequence[DatasetEntry],
    config: TrainConfig,
    tokenizer: Any,
    account: Account,
    progress: Callable[[int], None] | None,
) -> list[Sample]:
    """All usable samples of the entries, in the order of the files."""
    samples: list[Sample] = []
    before = (account.rows, account.lost, account.dropped)
    for entry in entries:
        chunk: list[tuple[int, Rendered | Tokens]] = []
        for line, ready in _prepared(entry, config, tokenizer, account):
            chunk.append((line, ready))
            if len(chunk) == _CHUNK:
                samples += _fitting(chunk, entry, config, tokenizer, account)
                chunk = []
                if progress is not None:
                    progress(account.rows)
        samples += _fitting(chunk, entry, config, tokenizer, account)
    rows, lost, dropped = (
        now - then
        for now, then in zip((account.rows, account.lost, account.dropped), before, strict=True)
    )
    paths = ", ".join(entry.path for entry in entries)
    if lost > _MOST * rows or not samples:
        raise DataError(
            f"nothing to train on: of {rows:,} rows of {paths} {lost:,} have no trained token "
            f"within max_length {config.max_length:,} and {dropped:,} are longer than it"
            "\nhint: a larger max_length, or look at the shape of the rows"
        )
    return samples


def _prepared(
    entry: DatasetEntry, config: TrainConfig, tokenizer: Any, account: Account
) -> Iterator[tuple[int, Rendered | Tokens]]:
    """Rows of one file up to the tokenizer, their problems placed by file and line."""

    def skip(problem: DataError) -> None:
        account.rows += 1
        account.skipped.append(str(problem).partition("\n")[0])

    on_bad_line = skip if config.on_bad_line == "skip" else None
    shape: str | None = None
    for line, row in read_rows(entry, on_bad_line=on_bad_line):
        try:
            mapped = map_columns(row, entry.columns)
            if shape is None:
                shape = shape_of(mapped, wanted=entry.type)
                _note_shape(shape, mapped, entry, account)
            shape_of(mapped, wanted=shape)
            ready = prepare(mapped, shape, tokenizer, config)
        except ConfigError as problem:
            placed = _placed(problem, entry.path, line)
            if on_bad_line is None or not isinstance(placed, DataError):
                raise placed from problem
            on_bad_line(placed)
            continue
        account.rows += 1
        yield line, ready


def _placed(problem: ConfigError, path: str, line: int) -> ConfigError:
    """The same problem with file and line in front of its hint."""
    text, hint, rest = str(problem).partition("\nhint: ")
    return type(problem)(f"{text} ({path}, line {line}){hint}{rest}")


def _note_shape(shape: str, row: Any, entry: DatasetEntry, account: Account) -> None:
    unused = unused_columns(shape, row)
    if unused:
        account.notes.append(f"{entry.path}: {shape}; columns not used: {', '.join(unused)}")


def _fitting(
    chunk: Sequence[tuple[int, Rendered | Tokens]],
    entry: DatasetEntry,
    config: TrainConfig,
    tokenizer: Any,
    account: Account,
) -> list[Sample]:
    """The samples of a chunk after truncation, without those that teach nothing."""
    kept = []
    samples = tokenize([ready for _, ready in chunk], tokenizer)
    for (line, _), whole in zip(chunk, samples, strict=True):
        sample = whole
        if len(whole.input_ids) > config.max_length:
            if config.truncation == "error":
                raise DataError(
                    f"longer than max_length {config.max_length:,}: {len(whole.input_ids):,} "
                    f"tokens ({entry.path}, line {line})\nhint: truncation=cut, or truncation=drop"
                )
            if config.truncation == "drop":
                account.dropped += 1
                continue
            account.cut += 1
            sample = Sample(whole.input_ids[: config.max_length], whole.labels[: config.max_length])
        if sample.num_trained == 0:
            account.lost += 1
            continue
        account.doubled_bos += has_doubled_bos(sample, tokenizer)
        kept.append(sample)
    return kept


def _split(samples: list[Sample], config: TrainConfig) -> tuple[list[Sample], list[Sample]]:
    """Hold out ``val_size`` samples, drawn by the data's seed; both lists keep the file's order."""
    size = config.val_size or 0
    count = max(1, round(size * len(samples))) if size < 1 else int(size)
    if count >= len(samples):
        raise DataError(
            f"val_size: {size:g} leaves nothing to train on: there are {len(samples):,} samples"
            "\nhint: val_size=0.1"
        )
    seed = config.seed if config.data_seed is None else config.data_seed
    chosen = set(random.Random(f"{seed}/held out").sample(range(len(samples)), count))
    train = [sample for i, sample in enumerate(samples) if i not in chosen]
    return train, [samples[i] for i in sorted(chosen)]
