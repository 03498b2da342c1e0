"""One sample as text, its trained tokens between ▌ and ▐."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.data.samples import IGNORED

if TYPE_CHECKING:
    from roundpipe.finetune.data.samples import Sample

_MOST_RUNS = 8  # of a long conversation: its beginning and its end
# A terminal would obey these, and data may hold anything.
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20)} | dict.fromkeys(range(0x7F, 0xA0), "␡")
_SHOWN |= {ord("\n"): "⏎", ord("\t"): "⇥"}


def marked_sample(sample: Sample, tokenizer: Any, *, width: int | None = 72) -> str:
    """Decode a sample on one line, newlines as ⏎, trained tokens between ▌ and ▐.

    A run longer than ``width`` characters is shortened in its middle, so that its end shows; of
    very many runs the first and the last are shown. None: everything.
    """
    pieces = []
    position, text = 0, ""
    for is_trained, run in groupby((sample.labels != IGNORED).tolist()):
        position += len(list(run))
        # Decoding from the start keeps the spaces that a tokenizer drops at the start of a text.
        longer = tokenizer.decode(sample.input_ids[:position].tolist(), skip_special_tokens=False)
        piece = _shortened(longer[len(text) :].translate(_SHOWN), width)
        pieces.append(f"▌{piece}▐" if is_trained else piece)
        text = longer
    if width is not None and len(pieces) > _MOST_RUNS:
        pieces = [*pieces[: _MOST_RUNS // 2], " … ", *pieces[-_MOST_RUNS // 2 :]]
    return "".join(pieces)


def _shortened(text: str, width: int | None) -> str:
    if width is None or len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 3].rstrip()} … {text[-tail:].lstrip()}"
