"""How long a run is, which samples each step takes, and when evaluation is due."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.data.collate import batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.settings.config import TrainConfig


@dataclass(frozen=True)
class RunLength:
    """Counts of a run, in samples and optimizer steps."""

    num_samples: int
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, config: TrainConfig, num_samples: int) -> RunLength:
        """``max_steps``, or else the steps of ``num_train_epochs``, rounded up."""
        per_epoch = math.ceil(num_samples / config.batch_size)
        by_epochs = max(1, math.ceil(config.num_train_epochs * per_epoch))
        return cls(num_samples, per_epoch, config.max_steps or by_epochs)

    def epoch(self, step: int) -> float:
        """Passes over the data after ``step`` steps."""
        return step / self.steps_per_epoch

    def is_evaluation_due(self, config: TrainConfig, step: int) -> bool:
        """Whether to evaluate after ``step``: as ``eval_strategy`` says, and at the very end."""
        if config.eval_strategy == "no":
            return False
        if step == self.total_steps:
            return True
        every = config.eval_steps if config.eval_strategy == "steps" else self.steps_per_epoch
        return every is not None and step % every == 0

    def state(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """The ``trainer_state.json`` of a finished run."""
        return {
            "global_step": self.total_steps,
            "max_steps": self.total_steps,
            "epoch": round(self.epoch(self.total_steps), 4),
            "log_history": history,
        }


def sample_order(config: TrainConfig, length: RunLength) -> Iterator[list[int]]:
    """The samples of each step of the run; depends on ``data_seed`` (or ``seed``) alone."""
    seed = config.seed if config.data_seed is None else config.data_seed
    endless = (
        indices
        for epoch in itertools.count()
        for indices in batches(length.num_samples, config.batch_size, seed, epoch)
    )
    return itertools.islice(endless, length.total_steps)
