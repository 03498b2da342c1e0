"""The tokenizer of a ``processing_class``."""

from __future__ import annotations

from typing import Any

from roundpipe.errors import ConfigError


def tokenizer_from(processing_class: Any) -> Any:
    """The tokenizer in it, None where none is given. Raises ConfigError for what has none.

    Of a processor, which reads images or sound too, its tokenizer: text alone is trained.
    """
    if processing_class is None:
        return None
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, which has no tokenizer"
            "\nhint: processing_class=AutoTokenizer.from_pretrained(…), or leave it out"
        )
    return tokenizer
