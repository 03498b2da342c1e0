"""The best evaluation of a run so far, and how many since then were no better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Best:
    """``loss`` and ``step`` are None before the first evaluation; ``num_worse``: since the best."""

    loss: float | None = None
    step: int | None = None
    num_worse: int = 0

    def add(self, step: int, loss: float) -> bool:
        """Take an evaluation; whether it is the best. One that is not finite never is."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    def is_given_up(self, patience: int | None) -> bool:
        """Whether the last ``patience`` evaluations were no better."""
        return patience is not None and self.num_worse >= patience

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as when ``state`` was given."""
        self.loss, self.step = state["loss"], state["step"]
        self.num_worse = int(state["num_worse"])
