"""What became of the rows that were read, and how people are told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from roundpipe.finetune.data.spans import Rendered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.data.samples import Samples
    from roundpipe.finetune.data.shapes import Tokens


@dataclass(frozen=True, slots=True)
class Stats:
    """What a list of samples holds; lengths in tokens."""

    samples: int
    tokens: int
    trained: int
    median_length: int
    p90_length: int
    max_length: int

    @property
    def trained_share(self) -> float:
        """Trained tokens over all tokens."""
        return self.trained / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens, "
            f"{100 * self.trained_share:.0f} % trained"
        )


def stats_of(samples: Samples) -> Stats:
    """Counts and length percentiles (nearest rank) of samples."""
    lengths = np.sort(samples.lengths)

    def rank(share: float) -> int:
        at = max(0, int(np.ceil(share * len(lengths))) - 1)
        return int(lengths[at]) if len(lengths) else 0

    return Stats(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        trained=int(samples.num_trained.sum(dtype=np.int64)),
        median_length=rank(0.5),
        p90_length=rank(0.9),
        max_length=rank(1.0),
    )


@dataclass(slots=True)
class Account:
    """What became of the rows of a dataset, or of one entry of it.

    ``skipped``: the first of the problems of the ``num_skipped`` rows that were no samples.
    ``shape`` and the columns it leaves ``unused`` are those of one entry. ``split``: samples beyond
    one for each row; ``odd``: how often a template did something that people should know.
    """

    rows: int = 0
    cut: int = 0
    dropped: int = 0
    lost: int = 0
    doubled_bos: int = 0
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shape: str = ""
    unused: list[str] = field(default_factory=list)
    split: int = 0
    odd: dict[str, int] = field(default_factory=dict)

    def note_odd(self, ready: Sequence[Rendered | Tokens]) -> None:
        """Count what is odd about how a template took a row, given all that became of it."""
        texts = [each for each in ready if isinstance(each, Rendered)]
        for what in sorted({what for text in texts for what in text.oddities}):
            self.odd[what] = self.odd.get(what, 0) + 1

    def add(self, other: Account) -> None:
        """Take in the account of another entry, save for what that entry alone can say."""
        for entry in fields(self):
            if entry.name in ("shape", "unused", "odd"):
                continue
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))
        for what, count in other.odd.items():
            self.odd[what] = self.odd.get(what, 0) + count

    def to_json(self) -> dict[str, Any]:
        """The account as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The account that ``to_json`` gave. Raises TypeError."""
        return cls(**values)

    def warnings(self, limit: int) -> list[str]:
        """What was cut, left out or odd, a line each; ``limit``: max_length."""
        first = self.skipped[0].replace("\n", " ") if self.skipped else ""
        counted = (
            (self.cut, f"cut at max_length {limit:,}"),
            (self.dropped, f"left out, longer than max_length {limit:,}"),
            (self.lost, "left out, no trained token"),
            (self.doubled_bos, "start with the begin token twice: the text or template has one"),
            (self.num_skipped, f"skipped, the first: {first}"),
            *((count, f"rows: {what}") for what, count in sorted(self.odd.items())),
        )
        lines = [f"warning: {count:,} of {self.rows:,} {what}" for count, what in counted if count]
        if self.split:
            lines.append(
                "the chat template writes answers otherwise once more messages follow: "
                f"{self.split:,} more samples, so that each is trained as it is asked for "
                "(mask_history=true: only each last one)"
            )
        return lines
