"""Rows that go to a collator as they are, with what a run asks of its samples."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.finetune.data.samples import IGNORED
from roundpipe.finetune.trainer.rows import is_transformed, num_rows, row_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# What models and transformers' collators know; TRL's packing adds the last.
_COLUMNS = frozenset(
    (
        "attention_mask",
        "input_ids",
        "inputs_embeds",
        "label",
        "label_ids",
        "labels",
        "position_ids",
        "seq_lengths",
        "token_type_ids",
    )
)


class Features(dict[str, Any]):
    """One row: what a collator is given, and its tokens as a `Sample` would tell them."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """The tokens, none where the row has no such column."""
        return _numbers(self.get("input_ids", ()))

    @property
    def labels(self) -> NDArray[np.int32]:
        """A label for each token; those of the tokens themselves where the row has none."""
        labels = _numbers(self.get("labels", self.input_ids)).copy()
        labels[:1] = IGNORED
        return labels


class RowSamples:
    """Rows of a dataset with a length, read when they are asked for.

    ``removes_columns``: only what models know is left of a row.
    """

    def __init__(self, dataset: Any, *, removes_columns: bool) -> None:
        self._dataset = dataset
        self._removes = removes_columns
        count = num_rows(dataset)
        assert count is not None, "rows without a number are read first"
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Features]:
        return (self[i] for i in range(self._count))

    def __getitem__(self, index: int) -> Features:
        row = row_at(self._dataset, index)
        names = [name for name in row if not self._removes or name in _COLUMNS]
        return Features({name: row[name] for name in names})

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [rows]; 1 where a row has no tokens yet. Reads all rows."""
        return np.array([max(1, len(row.input_ids)) for row in self], np.int64)

    @cached_property
    def num_trained(self) -> NDArray[np.int32]:
        """Trained tokens of each row, as far as the rows say it."""
        return np.array([np.count_nonzero(row.labels != IGNORED) for row in self], np.int32)

    def marks(self) -> NDArray[np.int64]:
        """No row is told from another by its tokens: a collator may change them."""
        return np.zeros(0, np.int64)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all rows; of their number alone where a function changes them each time."""
        digest = hashlib.sha256(str(self._count).encode())
        if is_transformed(self._dataset) or (self._count and _text(self[0]) != _text(self[0])):
            return digest.hexdigest()
        for row in self:
            digest.update(_text(row).encode("utf-8", "replace"))
        return digest.hexdigest()


def _numbers(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32).reshape(-1)


def _text(row: Features) -> str:
    plain = {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()
    }
    return repr(sorted(plain.items(), key=lambda item: item[0]))
