"""Tokens that a causal LM has no row for, refused while they are still on the host.

On a card such a token does not raise where it is used: it ends every computation of the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.models.loss import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping


class Vocabulary:
    """How many tokens a model reads, as far as it says so, and predicts.

    ``model``: or None. ``num_predicted``: logits of a token, as it made them; 0: unknown. (What its
    head says of itself may be wrong: that of another module, under adapters that tie it again.)
    """

    def __init__(self, model: Any, num_predicted: int = 0) -> None:
        self._read = None
        self._predicted = num_predicted or None
        if hasattr(model, "get_input_embeddings"):
            self._read = getattr(model.get_input_embeddings(), "num_embeddings", None)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError, naming the argument, for a token outside.

        ``given``: a call's arguments by name. Looks at those that are on the host.
        """
        _require(given, "input_ids", self._read)
        ignored = given.get("ignore_index", IGNORED)
        for name in ("labels", "shift_labels"):
            _require(given, name, self._predicted, ignored)


def _require(
    given: Mapping[str, Any], name: str, size: int | None, ignored: int | None = None
) -> None:
    tokens = given.get(name)
    if size is None or not isinstance(tokens, Tensor) or tokens.device.type != "cpu":
        return
    if tokens.dim() != 2 or tokens.dtype.is_floating_point or not tokens.numel():
        return
    outside = (tokens < 0) | (tokens >= size)
    if ignored is not None:
        outside &= tokens != ignored
    if outside.any():
        row, column = (int(at) for at in outside.nonzero()[0])
        note = "" if ignored is None else f"; {ignored} marks what is not trained"
        raise ConfigError(
            f"{name} hold a token outside the vocabulary: {int(tokens[row, column])} in row {row}, "
            f"column {column}\nhint: tokens from 0 to {size - 1}{note}"
        )
