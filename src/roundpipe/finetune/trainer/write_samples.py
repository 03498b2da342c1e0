"""Rows, one after another, into samples on disk.

rows → text and spans → tokens, many at a time → cut → written
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.encode import has_doubled_bos, tokenize
from roundpipe.finetune.data.packing import Packing
from roundpipe.finetune.data.samples import Sample
from roundpipe.finetune.data.tokens import TokenWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from roundpipe.finetune.data.account import Account
    from roundpipe.finetune.data.samples import Part
    from roundpipe.finetune.trainer.sft_rows import RowReader

_CHUNK = 256  # rows that go to the tokenizer at once


@dataclass(frozen=True)
class Enough:
    """How much of a stream is read: so many samples, or so many tokens; None: all of it."""

    samples: int | None = None
    tokens: int | None = None

    def is_reached(self, samples: int, tokens: int) -> bool:
        """Whether that much is there."""
        by_samples = self.samples is not None and samples >= self.samples
        return by_samples or (self.tokens is not None and tokens >= self.tokens)


@dataclass(frozen=True)
class Written:
    """Samples of one dataset. ``packing``: which stand in one row, where rows came packed."""

    part: Part
    packing: Packing | None


def write_samples(
    rows: Iterator[Mapping[str, Any]],
    reader: RowReader,
    *,
    name: str,
    account: Account,
    enough: Enough = Enough(),
    show: Callable[[int], None] = lambda rows: None,
) -> Written:
    """Tokenise ``rows``, which errors call by ``name``, until ``enough`` of them are there.

    Raises DataError or ConfigError for a row that cannot be used, with its number; ``on_bad_line:
    skip`` leaves it out and counts it.
    """
    with TokenWriter(None) as writer:
        into = _Into(reader, writer, account)
        for number, row in enumerate(rows, 1):
            account.rows += 1
            try:
                into.take(number, row)
            except DataError as problem:
                if reader.config.on_bad_line != "skip":
                    raise _placed(problem, name, number) from problem
                account.num_skipped += 1
                account.skipped = account.skipped or [f"row {number}: {_first_line(problem)}"]
            except ConfigError as problem:
                raise _placed(problem, name, number) from problem
            if number % _CHUNK == 0:
                show(number)
            if into.count >= _CHUNK:
                into.flush()
            if enough.is_reached(into.samples + into.count, into.tokens):
                break
        into.finish()
        return Written(writer.mapped(), into.packing())


@dataclass
class _Into:
    """Rows that are read and not written yet, and what was written."""

    reader: RowReader
    writer: TokenWriter
    account: Account
    samples: int = 0
    tokens: int = 0
    _waiting: list[tuple[int, Any]] = field(default_factory=list)
    _sizes: dict[int, list[int]] = field(default_factory=dict)  # of the samples of packed rows
    _is_packed: bool = False
    _rest: list[Sample] = field(default_factory=list)  # of a row that is not full
    _kept: list[tuple[int, Sample]] = field(default_factory=list)  # and not written yet

    @property
    def count(self) -> int:
        """Pieces that wait for the tokenizer."""
        return len(self._waiting)

    def take(self, number: int, row: Mapping[str, Any]) -> None:
        """Read one row."""
        ready = self.reader.read(row)
        if self.reader.shape == "input_ids":
            self._is_packed = self._is_packed or len(ready) > 1
        elif len(ready) > 1:
            self.account.split += len(ready) - 1
        self.account.note_odd(ready)
        self._waiting += [(number, each) for each in ready]

    def flush(self) -> None:
        """Tokenise and write what was read."""
        samples = tokenize([ready for _, ready in self._waiting], self.reader.tokenizer)
        for (number, _), whole in zip(self._waiting, samples, strict=True):
            for sample in self._pieces(whole):
                self._take(number, sample)
        self._waiting.clear()
        self._write()

    def finish(self) -> None:
        """Write everything."""
        self.flush()
        if self._rest:
            self._keep(self.account.rows, _joined(self._rest))
            self._rest = []
            self._write()

    def packing(self) -> Packing | None:
        """The rows as they came, where samples of one row belong together."""
        if not self._is_packed:
            return None
        sizes = list(self._sizes.values())
        starts = np.cumsum([0, *map(len, sizes)], dtype=np.int64)
        tokens = np.array([sum(each) for each in sizes], np.int64)
        return Packing(np.arange(starts[-1], dtype=np.int64), starts, tokens)

    def _write(self) -> None:
        self.writer.add([sample for _, sample in self._kept], [row for row, _ in self._kept])
        self._kept.clear()

    def _take(self, number: int, sample: Sample) -> None:
        if self.reader.config.packing and self.reader.how.packing_strategy == "wrapped":
            self._rest.append(self._behind_others(sample))
            limit = self.reader.config.max_length
            while sum(map(len, self._rest)) >= limit:
                whole = _joined(self._rest)
                self._rest = [Sample(whole.input_ids[limit:], whole.labels[limit:])]
                self._keep(number, Sample(whole.input_ids[:limit], whole.labels[:limit]))
            return
        self._keep(number, sample)

    def _behind_others(self, sample: Sample) -> Sample:
        """A sample within a wrapped row: where all is trained, so is its first token.

        What stands before it in the row predicts it, as in TRL.
        """
        labels = sample.labels.copy()
        if labels[1:].size and np.array_equal(labels[1:], sample.input_ids[1:]):
            labels[0] = sample.input_ids[0]
        return Sample(sample.input_ids, labels)

    def _keep(self, number: int, sample: Sample) -> None:
        labels = sample.labels.copy()
        labels[:1] = -100  # nothing stands before it
        sample = Sample(sample.input_ids, labels)
        if sample.num_trained == 0:
            self.account.lost += 1
            return
        self.account.doubled_bos += has_doubled_bos(sample, self.reader.tokenizer)
        self._kept.append((number, sample))
        self.samples, self.tokens = self.samples + 1, self.tokens + len(sample)
        if self.reader.shape == "input_ids":
            self._sizes.setdefault(number, []).append(len(sample))

    def _pieces(self, sample: Sample) -> list[Sample]:
        """The sample within ``max_length``: cut, in several pieces, or not at all."""
        config, how = self.reader.config, self.reader.how
        limit, is_tokens = config.max_length, self.reader.shape == "input_ids"
        is_whole = is_tokens and (how.takes_as_is or not how.cuts_tokens or self._is_packed)
        if len(sample) <= limit or is_whole:
            return [sample]
        if config.packing and how.is_theirs and how.packing_strategy == "wrapped":
            return [sample]
        if config.packing and how.is_theirs and how.packing_strategy == "bfd_split":
            edges = range(0, len(sample), limit)
            return [
                Sample(sample.input_ids[at : at + limit], sample.labels[at : at + limit])
                for at in edges
            ]
        if config.truncation == "error":
            raise DataError(
                f"longer than max_length {limit:,}: {len(sample):,} tokens\nhint: truncation=cut"
            )
        if config.truncation == "drop":
            self.account.dropped += 1
            return []
        self.account.cut += 1
        return [Sample(sample.input_ids[:limit], sample.labels[:limit])]


def _joined(samples: list[Sample]) -> Sample:
    return Sample(
        np.concatenate([sample.input_ids for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
    )


def _placed(problem: ConfigError, name: str, number: int) -> ConfigError:
    return type(problem)(f"{name}: row {number}: {problem}")


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
