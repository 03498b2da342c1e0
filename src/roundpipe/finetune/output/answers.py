"""Answers before and after, side by side: two columns where there is room, else one below another.

what is 12 + 7?
before                                │ after
The question is about a sum of two    │ 12 + 7 = 19. Answer: 19
numbers, which …                      │
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from roundpipe.finetune.output.characters import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_WIDTH = 80  # of a terminal that has room for two columns
_MOST_WIDTH = 160
_INDENT, _BETWEEN = "  ", " │ "
_BEFORE_AFTER = ("before", "after")


def in_columns(
    prompt: str, left: str, right: str, *, width: int, names: tuple[str, str] = _BEFORE_AFTER
) -> list[str]:
    """Lines of at most ``width`` characters: the prompt, and two answers beside each other."""
    from rich.cells import set_cell_size  # noqa: PLC0415, costs 0.1 s where nothing is answered

    half = (min(width, _MOST_WIDTH) - len(_INDENT + _BETWEEN) - 1) // 2
    columns = [
        _wrapped(f"{name}\n{text}", half) for name, text in zip(names, (left, right), strict=True)
    ]
    pairs = itertools.zip_longest(*columns, fillvalue="")
    beside = [f"{set_cell_size(one, half)}{_BETWEEN}{other}" for one, other in pairs]
    asked = _wrapped(prompt, 2 * half)
    return [f"{_INDENT}{line}".rstrip() for line in (*asked, *beside)]


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text as a terminal of ``width`` cells shows them."""
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    lines = Text(harmless(text.strip())).wrap(Console(width=width, no_color=True), width)
    return [line.plain.rstrip() for line in lines]


def stacked(
    prompt: str, left: str, right: str, *, names: tuple[str, str] = _BEFORE_AFTER
) -> list[str]:
    """Three lines, for pipes and files: the prompt and the two answers, each on one line."""
    size = max(map(len, names)) + 1
    return [
        f"prompt: {one_line(prompt)}",
        *(
            f"  {f'{name}:':{size}} {one_line(text)}".rstrip()
            for name, text in zip(names, (left, right), strict=True)
        ),
    ]


def answers_text(prompts: Sequence[str], before: Sequence[str], after: Sequence[str]) -> str:
    """All of them as Markdown, for loggers that show text."""
    parts = [
        f"**{one_line(prompt)}**\n\nbefore\n\n{_quoted(old)}\n\nafter\n\n{_quoted(new)}"
        for prompt, old, new in zip(prompts, before, after, strict=True)
    ]
    return "\n\n".join(parts)


def one_line(text: str) -> str:
    """The words of a text with one space between them."""
    return " ".join(text.split())


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines() or [""])
