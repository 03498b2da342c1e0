"""A loss function of the user's in place of the model's own.

It is called as transformers' Trainer calls its ``compute_loss_func``, once for each microbatch:
with the model's outputs, that microbatch's labels, and the number of tokens that all of the step's
labels train. What it returns is a share of the step's loss; the shares are summed. A function that
divides a sum over tokens by that number is the same however a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.engine.microbatch import DEFAULT_NUM_MICROBATCH
from roundpipe.models.loss import count_trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roundpipe.config import RoundPipeRunConfig


@dataclass(frozen=True)
class OwnLoss:
    """``function(outputs, labels, num_items_in_batch=…)`` gives a loss, 0-d."""

    function: Callable[..., Tensor]

    def parted(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """A batch without its labels, which the model must not see, and these."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return inputs, batch["labels"]

    def over(self, labels: Tensor) -> Callable[[Any, Tensor], Tensor]:
        """The loss of one microbatch of a step that has these ``labels`` in all."""
        count = torch.tensor(count_trained_tokens(labels))

        def loss(outputs: Any, part: Tensor) -> Tensor:
            return self.function(outputs, part, num_items_in_batch=count)

        return loss

    def run_config(self, config: RoundPipeRunConfig, num_rows: int) -> RoundPipeRunConfig:
        """Cut inputs and labels alike, row after row, into a number that is said: losses add up."""
        count = config.num_microbatch or DEFAULT_NUM_MICROBATCH
        return replace(config, num_microbatch=min(count, num_rows), split_input=None)
