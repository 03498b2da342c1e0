"""Rows that cannot be used: where each stands, what is wrong with it, and what then happens.

Files are read on after the first bad row, so that a person sees all mistakes of one kind at once;
nothing is tokenised any more by then, and reading ends after a bounded number of rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from roundpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN = 20  # problems that are listed one by one
_READ_ON = 100_000  # rows that are looked at after the first bad one
_AROUND = 30  # characters of an excerpt on each side of the place
_LONGEST = 300  # characters of one problem
_RAW = 1 << 20  # characters of a row that the reject file keeps


class Place(NamedTuple):
    """Where a row stands: the file as the user knows it, and a number from 1."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class Row(NamedTuple):
    """A row of a file. ``raw``: the bytes it was written as, where it has bytes of its own."""

    place: Place
    values: dict[str, Any]
    raw: bytes | None = None


# Told of each row that cannot be read; returns if reading is to go on, else raises.
if TYPE_CHECKING:
    Report = Callable[[DataError, Place, bytes | None], None]


def stop_at_once(problem: DataError, place: Place, raw: bytes | None) -> None:
    """Raise the problem: what is done with bad rows where nobody else says."""
    raise problem


@dataclass(slots=True)
class BadRows:
    """The bad rows of one entry. ``rejects``: where they are written if they are skipped."""

    skip: bool
    rejects: IO[bytes] | None = None
    count: int = 0
    first: list[str] = field(default_factory=list)
    _problem: ConfigError | None = None
    _hints: set[str] = field(default_factory=set)
    _rows_since: int = 0

    def add(self, problem: DataError, place: Place, raw: bytes | None) -> None:
        """Take a bad row: written down if they are skipped, else one more reason to stop."""
        self.count += 1
        text, _, hint = str(problem).partition("\nhint: ")
        if len(self.first) < _SHOWN:
            self.first.append(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
            self._hints.add(hint)
        self._problem = self._problem or problem
        if self.skip and self.rejects is not None:
            self.rejects.write(_rejected(text, place, raw))

    def end_with(self, problem: DataError, file: str) -> None:
        """Take what reading ended with, which no setting leaves out."""
        self.add(problem, Place(file, 0), None)
        self._hints = {str(problem).partition("\nhint: ")[2]}

    @property
    def must_stop(self) -> bool:
        """Whether nothing that follows will be used."""
        return self.count > 0 and not self.skip

    def has_seen_enough(self) -> bool:
        """Count a row after the first bad one and say whether to end reading."""
        self._rows_since += self.must_stop
        return self._rows_since > _READ_ON

    def check(self) -> None:
        """Raise DataError if there is a bad row and such rows are not skipped."""
        if not self.must_stop or self._problem is None:
            return
        if self.count == 1:
            raise self._problem
        more = self.count - len(self.first)
        beyond = "at least " if self._rows_since > _READ_ON else ""
        lines = [f"  {text}" for text in self.first]
        lines += [f"  and {beyond}{more:,} more"] if more else []
        hint = next(iter(self._hints)) if len(self._hints) == 1 else "on_bad_line=skip"
        raise DataError(
            f"{beyond}{self.count:,} rows cannot be used:\n" + "\n".join(lines) + f"\nhint: {hint}"
        )


def _rejected(problem: str, place: Place, raw: bytes | None) -> bytes:
    record = {
        "file": place.file,
        place.unit: place.number,
        "problem": problem,
        "raw": (raw or b"").decode("utf-8", "replace").rstrip("\r\n")[:_RAW],
    }
    return (json.dumps(record, ensure_ascii=True) + "\n").encode()


def placed(problem: ConfigError, place: Place) -> ConfigError:
    """The same problem with file and line in front of its hint."""
    text, hint, rest = str(problem).partition("\nhint: ")
    return type(problem)(f"{text} ({place}){hint}{rest}")


def excerpt(text: str, position: int) -> str:
    """What stands around a place, on one line, with nothing that a terminal would act on."""
    start, end = max(0, position - _AROUND), position + _AROUND
    shown = " ".join(text[start:end].split())
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    rest = text[end : end + 200].strip()
    return f"{'…' if start else ''}{shown}{'…' if rest else ''}"


_LEAVE_OUT = "on_bad_line=skip leaves such lines out"


def broken_json(
    place: Place, text: str, position: int, why: str, *, hint: str = _LEAVE_OUT
) -> DataError:
    """The error for JSON that ends at ``position`` of ``text``; ``place`` is that of the row."""
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return DataError(
        f"broken JSON: {place}, column {column}: {why[:1].lower() + why[1:]}: "
        f"{excerpt(text, position)}\nhint: {hint}"
    )


def not_an_object(place: Place, value: Any) -> DataError:
    """The error for a row that is JSON but has no columns."""
    return DataError(
        f"not an object: {place}: {excerpt(json.dumps(value)[:200], 0)}"
        '\nhint: {"question": …, "answer": …}'
    )


def not_utf8(place: Place, raw: bytes, start: int) -> DataError:
    """The error for bytes of another encoding, from the one at ``start`` on."""
    shown = excerpt(raw[max(0, start - 200) : start + 200].decode("utf-8", "replace"), start)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in raw[:64]:
        shown = "it looks like UTF-16; save it as UTF-8"
    return DataError(f"not UTF-8: {place}, byte {start + 1}\nhint: save it as UTF-8: {shown}")
