"""What a causal LM's arguments must have in common before they are cut: the rows of one batch.

What has another first dimension goes whole to every microbatch. A mask with a row too few would,
and a microbatch of one sample takes it: with the padding of another. Plain PyTorch raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_INPUTS = ("input_ids", "inputs_embeds")
_BESIDE = ("attention_mask", "position_ids", "token_type_ids")  # one row may stand for all
_LABELS = ("labels", "shift_labels")


def require_rows(given: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the argument, for one without a row for each sample."""
    inputs = next((v for name in _INPUTS if (v := given.get(name)) is not None), None)
    if not isinstance(inputs, Tensor) or inputs.dim() < 1:
        return
    batch_size = inputs.shape[0]
    for name in (*_INPUTS, *_BESIDE, *_LABELS):
        value = given.get(name)
        if not isinstance(value, Tensor) or is_second(name, value, batch_size):
            continue
        allowed = (1, batch_size) if name in _BESIDE else (batch_size,)
        if value.dim() < 2 or value.shape[0] not in allowed:
            raise ConfigError(
                f"{name} must have a row for each of {batch_size} samples: its shape is "
                f"{tuple(value.shape)}\nhint: rows as in input_ids, or RoundPipeRunConfig("
                "split_input=…) to cut a batch by rules of your own"
            )


def is_second(name: str, value: Tensor, batch_size: int) -> bool:
    """Whether samples lie along the second dimension: positions in time, height and width."""
    return name == "position_ids" and value.dim() == 3 and value.shape[1] == batch_size
