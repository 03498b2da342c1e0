"""Where a step lies in its epoch, as transformers' Trainer counts: in microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.finetune.data.order import Order


@dataclass(frozen=True)
class Epochs:
    """``size``: samples of a microbatch; ``num_microbatches``: of a step, but for an epoch's last.

    A position counts the steps of the order, from 1; those that were passed over count too.
    """

    order: Order
    size: int
    num_microbatches: int

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.order.steps_per_epoch

    def microbatches_of(self, position: int) -> int:
        """Microbatches of a step: of an epoch's last one those that are left."""
        number = (position - 1) % self.steps
        return min(self.num_microbatches, self._in_epoch - number * self.num_microbatches)

    def after(self, position: int) -> float:
        """Epochs made after a step; 0 at the beginning."""
        if position == 0:
            return 0.0
        epoch, number = divmod(position - 1, self.steps)
        made = (number + 1) * self.num_microbatches
        return epoch + min(made, self._in_epoch) / self._in_epoch

    @property
    def _in_epoch(self) -> int:
        return max(1, -(-self.order.num_rows // self.size))
