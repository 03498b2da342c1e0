"""Which samples each step of a run trains, calculated from the step alone.

    samples → rows (packing) → rows of an epoch (weights) → their order (strategy) → steps

Nothing of this is a state that would have to be saved: a run that goes on after step k asks for
step k + 1. Orders are calculated place by place (`permutation.py`), so the number of samples costs
no memory; only packing holds a number for each.

A part of the data with weight w gives round(w·n) of its n rows to every epoch. It is read as an
endless stream, one shuffled pass over its rows after another, of which each epoch takes the next
so many: half of the rows in one epoch, the other half in the next, no row twice before all others
were seen once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.packing import Packing, pack
from roundpipe.finetune.data.permutation import permuted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from roundpipe.finetune.settings.config import TrainConfig

    Numbers = NDArray[np.int64]

_MEGABATCH = 50  # batches that are sorted by length together, as transformers has it


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows ``first`` … ``first + count`` - 1, of which every epoch takes ``taken``."""

    first: int
    count: int
    taken: int

    @classmethod
    def of(cls, first: int, count: int, weight: float) -> _Part:
        return cls(first, count, max(1, round(weight * count)) if count else 0)


class Order:
    """The rows of every step of a run, by random access.

    A row is what stands in one sequence: a sample, or several where ``packing``. Steps count from
    1, as ``global_step`` does. Depends on the config, the samples' lengths and ``data_seed`` (or
    ``seed``) alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: Sequence[_Part],
        *,
        lengths: Numbers,
        packing: Packing | None = None,
        multiple: int = 1,
    ) -> None:
        """``lengths``: tokens of each row; ``multiple``: see `in_whole`."""
        self.packing = packing
        self._by_weight = sum(part.taken for part in parts)
        self.num_rows = self._by_weight // multiple * multiple
        self.steps_per_epoch = -(-self.num_rows // config.batch_size)
        by_epochs = max(1, math.ceil(config.num_train_epochs * self.steps_per_epoch))
        self.total_steps = config.max_steps or by_epochs
        self._batch_size = config.batch_size
        self._strategy = config.train_sampling_strategy
        self._seed = config.seed if config.data_seed is None else config.data_seed
        self._config, self._parts = config, tuple(parts)
        self._lengths = lengths
        self._sorted: tuple[tuple[int, int], Numbers] | None = None  # the newest megabatch

    @classmethod
    def of(cls, config: TrainConfig, dataset: Any) -> Order:
        """The order in which ``config`` trains on ``dataset.samples``.

        ``dataset.parts`` are (start, stop, weight) of the config's entries. With packing every
        sample must fit in ``max_length``. Takes a second for a million samples then.
        """
        samples = dataset.samples
        parts = getattr(dataset, "parts", None) or ((0, len(samples), 1.0),)
        if not config.packing:
            chosen = [_Part.of(start, stop - start, weight) for start, stop, weight in parts]
            return cls(config, chosen, lengths=lengths_of(samples))
        ranges = [(start, stop) for start, stop, _ in parts]
        packing = pack(lengths_of(samples), config.max_length, parts=ranges)
        in_row = packing.order[packing.starts[:-1]]  # a sample of each row: rows come part by part
        chosen, first = [], 0
        for start, stop, weight in parts:
            count = int(((start <= in_row) & (in_row < stop)).sum())
            chosen.append(_Part.of(first, count, weight))
            first += count
        return cls(config, chosen, packing=packing, lengths=packing.tokens)

    @classmethod
    def packed(cls, config: TrainConfig, packing: Packing) -> Order:
        """The order of rows that somebody packed already."""
        part = _Part.of(0, len(packing.tokens), 1.0)
        return cls(config, [part], packing=packing, lengths=packing.tokens)

    def in_whole(self, multiple: int) -> Order:
        """The same order, of which each epoch leaves out what makes no ``multiple`` of rows.

        Raises ConfigError where nothing would be left.
        """
        if multiple > self._by_weight:
            raise ConfigError(
                f"dataloader_drop_last leaves nothing of {self._by_weight:,} rows in batches of "
                f"{multiple:,}\nhint: dataloader_drop_last=False"
            )
        return Order(
            self._config,
            self._parts,
            lengths=self._lengths,
            packing=self.packing,
            multiple=multiple,
        )

    def rows(self, step: int) -> list[tuple[int, ...]]:
        """The samples of each row that the ``step``-th step trains; fewer in an epoch's last."""
        assert step >= 1, step
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        numbers = self._batch(epoch, batch)
        if self.packing is None:
            return [(number,) for number in numbers.tolist()]
        return [self.packing.row(number) for number in numbers.tolist()]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, 0 where there is none."""
        return int(self._lengths.max(initial=0))

    def describe(self) -> list[str]:
        """Lines for people: how samples are packed, and what of them an epoch sees."""
        lines, total = [], sum(part.count for part in self._parts)
        if self.packing is not None:
            lines.append(
                f"packing: {len(self.packing.order):,} samples in {total:,} rows of up to "
                f"{self.longest:,} tokens, {100 * self.packing.share_filled:.0f} % filled"
            )
        what = "samples" if self.packing is None else "rows"
        if self._by_weight != total:
            lines.append(f"by weight an epoch sees {self._by_weight:,} of {total:,} {what}")
        if left := self._by_weight - self.num_rows:
            lines.append(f"each epoch leaves out {left:,} {what}, which make no whole batch")
        return lines

    def epoch(self, step: int) -> float:
        """Passes over the data after ``step`` steps."""
        return step / self.steps_per_epoch

    def _batch(self, epoch: int, batch: int) -> Numbers:
        """The numbers of the rows of one step."""
        start = batch * self._batch_size
        stop = min(start + self._batch_size, self.num_rows)
        if self._strategy != "group_by_length":
            return self._at(epoch, np.arange(start, stop))
        # As many as transformers takes: at least four megabatches, of 50 batches at most.
        size = self._batch_size * min(max(self.num_rows // (4 * self._batch_size), 1), _MEGABATCH)
        group, offset = divmod(start, size)
        if self._sorted is None or self._sorted[0] != (epoch, group):
            places = np.arange(group * size, min((group + 1) * size, self.num_rows))
            numbers = self._at(epoch, places)
            longest_first = np.argsort(-self._lengths[numbers], kind="stable")
            self._sorted = (epoch, group), numbers[longest_first]
        return self._sorted[1][offset : offset + stop - start]

    def _at(self, epoch: int, places: Numbers) -> Numbers:
        """The rows at these places of an epoch."""
        is_mixed = len(self._parts) > 1 and self._strategy != "sequential"
        if is_mixed:
            places = permuted(places, self._by_weight, f"{self._seed}/epoch {epoch}")
        found = np.empty_like(places)
        start = 0
        for at, part in enumerate(self._parts):
            here = (start <= places) & (places < start + part.taken)
            stream = epoch * part.taken + places[here] - start
            found[here] = part.first + self._of_stream(at, part, stream)
            start += part.taken
        return found

    def _of_stream(self, at: int, part: _Part, places: Numbers) -> Numbers:
        """Rows at these places of a part's endless stream."""
        passes, within = np.divmod(places, part.count)
        if self._strategy == "sequential":
            return within
        for number in np.unique(passes).tolist():
            here = passes == number
            key = f"{self._seed}/part {at}/pass {number}"
            within[here] = permuted(within[here], part.count, key)
        return within


def lengths_of(samples: Any) -> Numbers:
    """Tokens of each sample, int64: as the samples themselves know it, or counted."""
    known = getattr(samples, "lengths", None)
    if known is not None:
        return np.asarray(known, dtype=np.int64)
    return np.fromiter((len(s.input_ids) for s in samples), np.int64, count=len(samples))
