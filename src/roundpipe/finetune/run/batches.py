"""How samples become the tensors that a model is given, and how these are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roundpipe.config import RoundPipeRunConfig
from roundpipe.finetune.data.collate import collate, split_of, tokens_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roundpipe.finetune.run.retry import Splitting
    from roundpipe.finetune.settings.config import TrainConfig


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


def batches_of(batches: Batches, samples: Any, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """All samples in their order, one to a row."""
    for start in range(0, len(samples), batch_size):
        stop = min(start + batch_size, len(samples))
        yield batches.batch(samples, [(i,) for i in range(start, stop)])


def cut_of(
    batches: Batches, config: TrainConfig, splitting: Splitting, num_rows: int
) -> RoundPipeRunConfig:
    """How a batch of so many rows is cut and run, in training as in an evaluation."""
    size = config.micro_batch_size
    return RoundPipeRunConfig(
        num_microbatch=splitting.count(num_rows)
        if size is None
        else splitting.count_of_size(num_rows, size),
        split_input=batches.split(size),
        recompute_grain=config.recompute_grain,
    )
