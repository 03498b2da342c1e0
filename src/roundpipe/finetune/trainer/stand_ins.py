"""What scripts and callbacks are shown in place of accelerate's and torch's own objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.run.batches import batches_of
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

    from roundpipe.finetune.run.prepare import Job


@dataclass(frozen=True)
class OneProcess:
    """For ``Accelerator``: who one is. There is one process, which drives all devices.

    ``device``: the first one.
    """

    device: torch.device
    write: Callable[[str], None]
    is_main_process: bool = True
    is_local_main_process: bool = True
    is_last_process: bool = True
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1

    def print(self, *words: Any) -> None:
        """Show words, as every process but the first would not."""
        self.write(" ".join(map(str, words)))

    def wait_for_everyone(self) -> None:
        """Return: nobody else is there."""

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The module that a RoundPipe was made of; its weights are newest after synchronize()."""
        if isinstance(model, RoundPipe):
            model.synchronize()
            return model.model
        return model


@dataclass(frozen=True)
class ShownBatches:
    """For a ``DataLoader``: samples in their own order, ``batch_size`` at a time; an epoch long.

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
