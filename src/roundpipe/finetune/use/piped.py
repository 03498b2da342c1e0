"""Prompts from a pipe, answers to a pipe: a line each, or as JSON.

text    a line is a prompt; an answer stands as it is, an empty line between two
json    a line is "a prompt", {"prompt": …} or {"messages": […]}; it comes back with "answer"
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError
from roundpipe.finetune.data.conversation import conversation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from roundpipe.finetune.output.prompts import Prompt

_AT_A_TIME = 8  # batches that are read before the first of them is answered: sorted by length
_WANT = '"a prompt", {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Asked:
    """One prompt as it came: ``row`` is given back with the answer, ``prompt`` is asked."""

    row: dict[str, Any]
    prompt: str | list[dict[str, Any]]

    def messages(self, system: str | None) -> Prompt:
        """What is asked, with a system prompt where it has none of its own."""
        if system is None:
            return self.prompt
        first = {"role": "system", "content": system}
        if isinstance(self.prompt, str):
            return [first, {"role": "user", "content": self.prompt}]
        return self.prompt if self.prompt[0]["role"] == "system" else [first, *self.prompt]


def read_lines(lines: Iterable[bytes], *, as_json: bool) -> Iterator[Asked]:
    """The prompts of lines; blank ones are none. Raises DataError with the number of a bad one."""
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise DataError(
                f"line {number} of the input is not UTF-8\nhint: iconv -t UTF-8 makes it so"
            ) from None
        if text.strip():
            yield _row(text, number) if as_json else Asked({"prompt": text}, text)


def _row(text: str, number: int) -> Asked:
    try:
        row = json.loads(text)
    except ValueError as problem:
        raise DataError(
            f"line {number} of the input is not JSON: {problem}\nhint: {_WANT}"
        ) from None
    if isinstance(row, str):
        row = {"prompt": row}
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        try:
            messages = conversation_of(row["messages"]).messages
        except DataError as problem:
            raise DataError(f"line {number} of the input: {problem}") from None
        return Asked(row, messages)
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f"line {number} of the input has no prompt: {text[:60]}\nhint: {_WANT}")
    return Asked(row, row["prompt"])


def answer_all(
    asked: Iterable[Asked],
    answers: Callable[[Sequence[Asked]], Sequence[dict[str, str]]],
    write: Callable[[str], None],
    *,
    as_json: bool,
    batch_size: int,
) -> int:
    """Answer prompts and write each answer, in their order; how many there were.

    ``answers`` gives for each prompt its answers by name: ``answer``, and ``base`` beside it.
    """
    rest, count = iter(asked), 0
    while some := list(itertools.islice(rest, _AT_A_TIME * batch_size)):
        for each, found in zip(some, answers(some), strict=True):
            if as_json:
                write(json.dumps({**each.row, **found}, ensure_ascii=False) + "\n")
            else:
                write(("\n" if count else "") + _as_text(found) + "\n")
            count += 1
    return count


def _as_text(found: dict[str, str]) -> str:
    if len(found) == 1:
        return found["answer"]
    return f"base: {found['base']}\nadapter: {found['answer']}"
