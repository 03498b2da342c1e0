"""Account: what each key of a config became, kept while it is read.

`roundpipe plan` shows it as a table; `roundpipe train` says its ``notes``, a few lines. A key is
told apart by its name: where file and command line both give it, the command line's word is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

MOST_TEXT = 60  # characters of a value in a table
_MOST_GIVEN = 48  # characters of a table's first column
NOTHING = "asks for nothing"
# hf_token and its like, not eos_token.
_SECRET = re.compile(r"(?:^|hf_|hub_|wandb_|auth_)token$|api_key$|secret$")


@dataclass
class _Key:
    value: Any
    fields: list[str] = field(default_factory=list)
    aside: str | None = None


@dataclass(frozen=True)
class Became:
    """What one key became: ``text`` in our words; ``is_same`` where it is ours, value and all."""

    key: str
    value: str
    text: str
    is_same: bool


class Account:
    """Takes down what becomes of each key."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.beyond: list[str] = []  # notes that say more than the table of keys
        self._keys: dict[str, _Key] = {}

    def read(self, key: str, value: Any, target: str) -> None:
        """A key was read that goes on under the name ``target``."""
        self._keys[key] = _Key(value, [target])

    def has(self, *names: str) -> bool:
        """Whether any of these keys was given, by its own name."""
        return any(name in self._keys for name in names)

    def name_of(self, target: str) -> str:
        """The key under which ``target`` was given."""
        return next((name for name, key in self._keys.items() if target in key.fields), target)

    def sets(self, target: str, fields: Iterable[str]) -> None:
        """What went on under ``target`` sets these fields, and ``target`` only if named."""
        found = [key for key in self._keys.values() if target in key.fields]
        for key in found:
            key.fields = list(fields)

    def adds(self, target: str, other: str) -> None:
        """What sets ``target`` sets another field too."""
        for key in self._keys.values():
            if target in key.fields and other not in key.fields:
                key.fields.append(other)

    def leaves(
        self, target: str, why: str, *, name: str | None = None, but: Collection[str] = ()
    ) -> None:
        """What went on under ``target`` becomes nothing.

        Of several keys the one called ``name``, or all ``but`` some.
        """
        for given, key in self._keys.items():
            is_meant = name in (None, given) and given not in but
            if target in key.fields and key.aside is None and is_meant:
                key.aside = why

    def say(self, note: str, *, in_table: bool = False) -> None:
        """Add a line to what is said of the config, once; ``in_table``: the rows say it too."""
        if note not in self.notes:
            self.notes.append(note)
            if not in_table:
                self.beyond.append(note)

    def rows(self, values: Mapping[str, Any]) -> list[Became]:
        """What each key became; ``values`` holds the finished fields, as a saved config would."""
        rows = []
        for name, key in self._keys.items():
            fields = [each for each in key.fields if each in values]
            text = key.aside
            if text is None:
                said = [each for each in fields if values[each] is not None] or fields
                text = ", ".join(f"{each}: {short_text(values[each])}" for each in said)
            given = "…" if is_secret(name) else short_text(key.value)
            is_same = key.aside is None and text == f"{name}: {given}"
            rows.append(Became(name, given, text or NOTHING, is_same))
        return rows


def account_lines(keys: Sequence[Became]) -> list[str]:
    """A table of keys that became others; those that did not, and those without effect, in a line.

    Empty where every key is ours and stayed as it is.
    """
    changed = [each for each in keys if not each.is_same and each.text != NOTHING]
    if not changed:
        return []
    words = [_cut(f"{each.key}: {each.value}", _MOST_GIVEN) for each in changed]
    width = max(map(len, words))
    lines = [
        f"  {word:<{width}}  →  {each.text}" for word, each in zip(words, changed, strict=True)
    ]
    for head, some in (
        ("as they are", [each.key for each in keys if each.is_same]),
        ("without effect", [each.key for each in keys if each.text == NOTHING]),
    ):
        if some:
            lines.append(f"  {head}: {', '.join(some)}")
    return lines


def is_secret(key: str) -> bool:
    """Whether a key of another trainer holds what no terminal and no log should show."""
    return _SECRET.search(key) is not None


def short_text(value: Any) -> str:
    """A value on one line, as a config would write it, long ones cut."""
    if isinstance(value, list | tuple | dict):
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6)
        text = text.strip()
    else:
        text = text_of(value)
    return _cut(text, MOST_TEXT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def text_of(value: Any) -> str:
    """A value as a config would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_empty(value: Any) -> bool:
    """Whether a foreign value asks for nothing."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "none", "null")
    return value is None or value is False or value in ([], {}, ())
