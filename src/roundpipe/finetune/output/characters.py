"""Characters that a stream can take, and those that a terminal may be shown."""

from __future__ import annotations

from typing import TextIO


def harmless(text: str) -> str:
    """A text without what moves a terminal's cursor, or worse: a model may write anything."""
    return "".join(each for each in text if each in "\n\t" or each.isprintable())


def put(stream: TextIO, text: str) -> None:
    """Write a text at once; what the stream's alphabet lacks becomes a question mark.

    Raises what the stream raises where nobody reads any longer.
    """
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
