"""Tokens that a model has a row for: what its tokenizer makes may be more, or what pads be none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from roundpipe.finetune.model.source import ModelSource


def num_rows(model: Any) -> int:
    """How many tokens the embedding of a causal LM has."""
    return int(model.get_input_embeddings().weight.shape[0])


def pad_token_of(tokenizer: Any, model: Any) -> int:
    """What fills short rows; masked, so that any token will do that the model has a row for.

    One that was added to a tokenizer only to pad with often has none.
    """
    rows = num_rows(model)
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int) and token < rows:
            return token
    return 0


def require_rows(model: Any, tokenizer: Any, samples: Iterable[Any], source: ModelSource) -> None:
    """Raise ConfigError where samples have tokens that the model's embedding has no row for.

    Left to the embedding, that would be an index out of range in the middle of a step, of which a
    GPU does not recover. ``samples``: with ``input_ids``, an array each.
    """
    rows = num_rows(model)
    if max(tokenizer.get_vocab().values(), default=0) < rows:
        return
    for sample in samples:
        if (token := int(sample.input_ids.max())) >= rows:
            raise ConfigError(
                f"the tokenizer of {source.given} makes tokens that the model does not have: "
                f"{tokenizer.convert_ids_to_tokens(token)} is token {token:,}, of {rows:,}"
                "\nhint: the tokenizer that came with the model, or chat_template=auto"
            )
