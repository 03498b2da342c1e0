"""Rows of a JSON array, decoded one by one out of a window that moves over the file.

Where an item does not fit the window yet, decoding it fails as if it were broken; the window then
grows to twice its size and it is tried again, unless what is wrong stands well before the window's
end. So an item is decoded at most twice as often as it is long, and memory follows the longest one.
"""

from __future__ import annotations

import codecs
import json
from typing import IO, TYPE_CHECKING, Any

from roundpipe.finetune.data.problems import (
    Place,
    Row,
    broken_json,
    not_an_object,
    not_utf8,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.data.files import DataFile
    from roundpipe.finetune.data.problems import Report

_WINDOW = 1 << 18  # bytes that are read at once
_LONGEST = 1 << 28  # characters of an item
_WORD = 16  # characters: longer than any word or escape that a window's end could cut


def array_rows(stream: IO[bytes], file: DataFile, report: Report) -> Iterator[Row]:
    """The objects of an array that ``stream`` starts with. Raises DataError at what is broken."""
    window = _Window(stream, file)
    window.next_mark("[")
    mark = window.peek()
    while mark != "]":
        place = window.place()
        value = window.take_value()
        if isinstance(value, dict):
            yield Row(place, value)
        else:
            report(not_an_object(place, value), place, None)
        mark = window.peek()
        if mark == ",":
            window.next_mark(",")
            mark = ""  # an item must follow
            window.peek()
        elif mark != "]":
            raise window.broken("Expecting ',' or ']'")
    window.next_mark("]")
    if window.peek():
        raise window.broken("Extra data")


class _Window:
    """Decoded text, a position in it, and the line that position stands on."""

    def __init__(self, stream: IO[bytes], file: DataFile) -> None:
        self._stream = stream
        self._name = file.name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._line = 1
        self._column = 1  # of _at
        self._ended = False

    def place(self) -> Place:
        return Place(self._name, self._line)

    def peek(self) -> str:
        """The next character that is no white space, or "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._advance(self._at + 1)
            if self._ended:
                return ""
            self._read_more(_WINDOW)

    def next_mark(self, mark: str) -> None:
        """Step over ``mark``, which is next."""
        if self.peek() != mark:
            raise self.broken(f"Expecting '{mark}'")
        self._advance(self._at + 1)

    def take_value(self) -> Any:
        """Decode the value that starts here and step behind it. Raises DataError."""
        size = _WINDOW
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                cut = problem.msg.startswith("Unterminated") or (
                    problem.pos + _WORD > len(self._text)
                )
                is_open = cut and len(self._text) - self._at < _LONGEST
                if is_open and not self._ended:
                    self._read_more(size)
                    size *= 2
                    continue
                raise self._broken_at(problem.pos, problem.msg) from problem
            except RecursionError as problem:
                raise self.broken("nested too deeply") from problem
            if end == len(self._text) and not self._ended:
                self._read_more(size)  # a number may go on
                continue
            self._advance(end)
            return value

    def broken(self, why: str) -> Exception:
        return self._broken_at(self._at, why)

    def _broken_at(self, position: int, why: str) -> Exception:
        self._advance(position)
        hint = (
            "correct it, or save the rows as .jsonl, one a line: there a broken one can be skipped"
        )
        problem = broken_json(self.place(), self._text, position, why, hint=hint)
        # The column is counted here: the window may begin in the middle of a line.
        wrong = position - (self._text.rfind("\n", 0, position) + 1) + 1
        text = str(problem).replace(f", column {wrong}:", f", column {self._column}:", 1)
        return type(problem)(text)

    def _advance(self, to: int) -> None:
        lines = self._text.count("\n", self._at, to)
        self._line += lines
        if lines:
            self._column = to - self._text.rfind("\n", self._at, to)
        else:
            self._column += to - self._at
        self._at = to

    def _read_more(self, size: int) -> None:
        """Drop what is behind, which moves every position, and read on."""
        raw = self._stream.read(size)
        try:
            text = self._decode.decode(raw, final=not raw)
        except UnicodeDecodeError as problem:
            self._advance(len(self._text))
            line = self._line + problem.object.count(b"\n", 0, problem.start)
            start = problem.object.rfind(b"\n", 0, problem.start) + 1
            place = Place(self._name, line)
            raise not_utf8(place, problem.object[start:], problem.start - start) from problem
        self._ended = not raw
        self._text = self._text[self._at :] + text
        self._at = 0
