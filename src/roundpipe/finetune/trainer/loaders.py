"""What callbacks are given as dataloaders: the batches of samples, to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.run.batches import batches_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roundpipe.finetune.run.prepare import Job


@dataclass(frozen=True)
class Batches:
    """Samples in their own order, ``batch_size`` at a time; as long as an epoch.

    ``dataset``: what the user gave. A run takes its batches from elsewhere: what is done to these
    changes nothing.
    """

    job: Job
    samples: Any
    batch_size: int
    dataset: Any = None

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return batches_of(self.job.batches, self.samples, self.batch_size)
