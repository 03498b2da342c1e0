"""One sample as text, its trained tokens between ▌ and ▐."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.data.encode import IGNORED

if TYPE_CHECKING:
    from roundpipe.finetune.data.encode import Sample


def marked_sample(sample: Sample, tokenizer: Any, *, width: int | None = 72) -> str:
    """Decode a sample on one line, newlines as ⏎, trained tokens between ▌ and ▐.

    A run longer than ``width`` characters is shortened in its middle, so that its end shows.
    """
    pieces = []
    position, text = 0, ""
    for is_trained, run in groupby(label != IGNORED for label in sample.labels):
        position += len(list(run))
        # Decoding from the start keeps the spaces that a tokenizer drops at the start of a text.
        longer = tokenizer.decode(sample.input_ids[:position], skip_special_tokens=False)
        piece = _shortened(longer[len(text) :].replace("\n", "⏎"), width)
        pieces.append(f"▌{piece}▐" if is_trained else piece)
        text = longer
    return "".join(pieces)


def _shortened(text: str, width: int | None) -> str:
    if width is None or len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 3].rstrip()} … {text[-tail:].lstrip()}"
