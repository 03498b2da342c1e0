"""What a model writes may not do what it likes with a terminal."""

from __future__ import annotations

import io

from roundpipe.finetune.output.characters import harmless, put


def test_what_moves_the_cursor_is_left_out_and_lines_are_kept() -> None:
    assert harmless("a\x1b[2Jb\r\n\tc\x07") == "a[2Jb\n\tc"


def test_what_the_alphabet_of_a_stream_lacks_is_a_question_mark() -> None:
    inner = io.BytesIO()
    stream = io.TextIOWrapper(inner, encoding="ascii")
    put(stream, "grüß\n")
    assert inner.getvalue() == b"gr??\n"
