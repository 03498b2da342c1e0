"""How the samples of a step become the tensors that a model is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roundpipe.finetune.data.collate import collate, split_of, tokens_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Batches(Protocol):
    """Makes batches of rows; whoever trains on rows of another kind has another one."""

    def batch(self, samples: Any, rows: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """One batch of ``rows``, each the numbers of its samples; the model's arguments by name."""
        ...

    def split(self, micro_batch_size: int | None) -> Any:
        """The ``split_input`` that cuts such a batch into microbatches; None: as usual."""
        ...

    def tokens_in(self, batch: dict[str, Tensor]) -> int:
        """How many tokens of a batch are no padding."""
        ...


@dataclass(frozen=True)
class Rows:
    """Samples of `roundpipe.finetune.data`, padded or packed."""

    pad_token_id: int
    is_packed: bool = False

    def batch(self, samples: Any, rows: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """See `collate`."""
        chosen = [[samples[i] for i in row] for row in rows]
        return collate(chosen, self.pad_token_id, packed=self.is_packed)

    def split(self, micro_batch_size: int | None) -> Any:
        """Rows of like length go together."""
        return split_of(micro_batch_size)

    def tokens_in(self, batch: dict[str, Tensor]) -> int:
        """How many tokens of a batch are no padding."""
        return tokens_in(batch)
