"""Two answers beside each other where there is room, below each other elsewhere."""

from __future__ import annotations

import io
import os
import shutil
from typing import TYPE_CHECKING

from rich.cells import cell_len

from roundpipe.finetune.output.answers import answers_text, in_columns, stacked
from roundpipe.finetune.output.terminal import Terminal

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

OLD = "The question is about a sum of two numbers, which have to be added up.\n\nSo we add."
NEW = "12 + 7 = 19 [bold].\nAnswer: 19"


def test_columns_are_wrapped_apart_and_keep_their_lines() -> None:
    assert in_columns("what is 12 + 7?", OLD, NEW, width=80) == [
        "  what is 12 + 7?",
        "  before                                │ after",
        "  The question is about a sum of two    │ 12 + 7 = 19 [bold].",
        "  numbers, which have to be added up.   │ Answer: 19",
        "                                        │",
        "  So we add.                            │",
    ]


def test_wide_letters_and_what_moves_a_cursor_do_not_break_columns() -> None:
    lines = in_columns("p", "你好世界" * 20, "\x1b[2J\r" + "z" * 100, width=90)
    assert all(cell_len(line) < 90 for line in lines)
    assert {cell_len(line.partition("│")[0]) for line in lines[1:]} == {45}
    assert "\x1b" not in "".join(lines)
    assert in_columns("p", "", "", width=300) == ["  p", f"  before{' ' * 72}│ after"]


def test_elsewhere_an_answer_is_one_line() -> None:
    assert stacked("what\nis it?", "a\nb", "", names=("base", "adapter")) == [
        "prompt: what is it?",
        "  base:    a b",
        "  adapter:",
    ]


def test_a_wide_terminal_shows_columns_and_the_log_has_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((100, 40)))
    stream = Wide()
    terminal = Terminal(stream)
    with terminal.logging_to(tmp_path / "run.log"):
        terminal.answers(["what?"], [OLD], [NEW])
    assert " │ 12 + 7 = 19" in stream.getvalue()
    logged = (tmp_path / "run.log").read_text().splitlines()
    assert logged == stacked("what?", OLD, NEW)


def test_loggers_get_markdown() -> None:
    assert answers_text(["what\nis it?"], ["a\n\nb"], [""]) == (
        "**what is it?**\n\nbefore\n\n> a\n>\n> b\n\nafter\n\n>"
    )
