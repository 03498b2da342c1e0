"""When to evaluate and when to save, told by the step and the clock."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.finetune.settings.config import TrainConfig


@dataclass
class Due:
    """``total_steps`` and ``steps_per_epoch`` as the order of the data has them.

    ``clock`` gives seconds; minutes are counted from when the last save was over.
    """

    config: TrainConfig
    total_steps: int
    steps_per_epoch: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since = self.clock()

    def is_evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after ``step`` steps: as ``eval_strategy`` says, and at the end."""
        strategy = self.config.eval_strategy
        if strategy == "no" or step == 0:
            return False
        return step == self.total_steps or self._is_due(step, strategy, self.config.eval_steps)

    def is_saving_due(self, step: int) -> bool:
        """Whether to save after ``step`` steps, as ``save_strategy`` says."""
        strategy = self.config.save_strategy
        if strategy in ("no", "best") or step == 0:
            return False
        if strategy == "minutes":
            return self.clock() - self._since >= 60 * self.config.save_minutes
        return self._is_due(step, strategy, self.config.save_steps)

    def saved(self) -> None:
        """Count minutes from now on."""
        self._since = self.clock()

    def _is_due(self, step: int, strategy: str, every: float | None) -> bool:
        if strategy == "epoch":
            return step % self.steps_per_epoch == 0
        return every is not None and step % step_count(every, self.total_steps) == 0


def step_count(every: float, total_steps: int) -> int:
    """A number of steps, or below 1 a share of all steps, rounded up."""
    return max(1, math.ceil(every * total_steps)) if every < 1 else int(every)
