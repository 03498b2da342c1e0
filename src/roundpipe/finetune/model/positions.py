"""How long a sequence the model can take: told before the first step, not by a failing layer.

A table of positions (GPT-2, OPT, GPT-J) ends where it ends: a longer sequence cannot be computed.
Positions that are turned (rotary) go on for ever, and mean ever less beyond what the model was
trained for: that is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

_OFFSET = 4  # rows that some tables have before their first position (OPT: 2)


def check_lengths(model: nn.Module, lengths: NDArray[np.int64], say: Callable[[str], None]) -> None:
    """Compare samples of ``lengths`` tokens with the positions that ``model`` was made for.

    Calls ``say`` where some are longer; raises ConfigError where the model cannot take them.
    """
    limit = longest_known(model)
    longest = int(lengths.max(initial=0))
    if limit is None or longest <= limit:
        return
    if has_table(model, limit):
        raise ConfigError(
            f"a sample has {longest:,} tokens, and the model has positions for {limit:,}"
            f"\nhint: max_length={limit}"
        )
    count = int((lengths > limit).sum())
    say(
        f"warning: {count:,} of {len(lengths):,} samples are longer than the {limit:,} tokens that "
        f"the model was made for; max_length={limit} cuts them"
    )


def longest_known(model: nn.Module) -> int | None:
    """Tokens that the model was made for, or None where its config does not say."""
    config: Any = model.config
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict):  # stretched from a shorter one: the product counts
        trained, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if isinstance(trained, (int, float)) and isinstance(factor, (int, float)):
            limit = max(limit, int(trained * factor))
    return limit


def most_computable(model: nn.Module) -> int | None:
    """Tokens beyond which the model cannot go on at all, or None: rotary positions never end."""
    limit = longest_known(model)
    return limit if limit is not None and has_table(model, limit) else None


def has_table(model: nn.Module, limit: int) -> bool:
    """Whether positions are rows of a table: learned ones, or sines written down."""
    tokens = getattr(model, "get_input_embeddings", lambda: None)()
    learned = (
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    )
    written = (
        buffer.shape[0]
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] == "embed_positions" and buffer.dim() > 1
    )
    return any(limit <= rows <= limit + _OFFSET for rows in (*learned, *written))
