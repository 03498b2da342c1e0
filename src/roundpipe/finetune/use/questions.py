"""Questions with known answers, out of the samples of a dataset, and whether an answer is right.

A sample says by its labels what is an answer. So the question is the very tokens that stand before
its last answer, as training had them: the template's header, a system prompt that was folded into
the question, tools, or no template at all. Nothing is read or written a second time.

Rules for an answer
1. What counts of a text is what the pattern's group holds: of several matches the last that holds
   anything, since a result stands at the end of its working.
2. Two such texts are equal if they are the same number (``1,234.50`` and ``1234.5``; a full stop or
   comma at the end belongs to the sentence), else if they are the same letters, blanks aside.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.samples import IGNORED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roundpipe.finetune.data.samples import Sample

_HINT = "answer_pattern='#### ([-0-9.,]+)'"
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
_95_PERCENT = 1.959963984540054  # standard deviations


@dataclass(frozen=True)
class Question:
    """``prompt``: token ids up to the answer; ``reference``: the answer that the data has."""

    prompt: list[int]
    reference: str


def question_of(sample: Sample, tokenizer: Any) -> Question | None:
    """The last answer of a sample, and all that stands before it; None where nothing does.

    A sample that is trained from end to end is text: its first token is no question.
    """
    trained = np.flatnonzero(sample.labels != IGNORED)
    if not len(trained):
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    start, stop = int(trained[gaps[-1] + 1] if len(gaps) else trained[0]), int(trained[-1]) + 1
    if start <= 1:
        return None
    answer = tokenizer.decode(sample.input_ids[start:stop].tolist(), skip_special_tokens=True)
    return Question(sample.input_ids[:start].tolist(), answer.strip())


class AnswerPattern:
    """A regular expression with one group, which holds what counts of an answer."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for an expression that cannot be read, or with another number."""
        self.text = text
        try:
            self._compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError) as problem:
            raise ConfigError(
                f"answer_pattern is no regular expression: {text}: {problem}\nhint: {_HINT}"
            ) from problem
        if self._compiled.groups != 1:
            raise ConfigError(
                f"answer_pattern needs one group, and has {self._compiled.groups or 'none'}: {text}"
                f"\nhint: {_HINT}; (?:…) where a bracket is not to count"
            )

    def find(self, text: str) -> str | None:
        """What counts of an answer, None where it has nothing of the kind."""
        found = [match[1].strip() for match in self._compiled.finditer(text) if match[1]]
        return next((each for each in reversed(found) if each), None)

    def wanted(self, questions: Iterable[Question], *, told: str) -> list[str | None]:
        """What counts of each reference. Raises ConfigError where it is nothing of any.

        ``told``: the data's name.
        """
        asked = list(questions)
        found = [self.find(question.reference) for question in asked]
        if not any(found):
            text = " ".join(asked[0].reference.split()) if asked else ""
            text = f"… {text[-60:]}" if len(text) > 60 else text
            raise ConfigError(
                f"answer_pattern matches no answer of {told}: {self.text}; the first ends: {text}"
                f"\nhint: {_HINT} finds the 72 of an answer that ends #### 72"
            )
        return found


def is_same(one: str, other: str) -> bool:
    """Whether two answers are the same number, or the same letters."""
    numbers = _number(one), _number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return " ".join(one.split()) == " ".join(other.split())


def _number(text: str) -> Decimal | None:
    plain = _THOUSANDS.sub("", text.strip()).rstrip(".,")
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def interval(count: int, total: int) -> tuple[float, float]:
    """Where the share that ``count`` of ``total`` was drawn from lies, with 95 % confidence.

    Wilson's interval (E. B. Wilson, 1927), which holds for few draws and for shares near 0 and 1.
    """
    if not total:
        return 0.0, 1.0
    share, square = count / total, _95_PERCENT**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    spread = share * (1 - share) / total + square / (4 * total**2)
    reach = _95_PERCENT * math.sqrt(spread) / (1 + square / total)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def refuse_shapes(shapes: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for data of a shape that has no answers; of each: (path, shape)."""
    for path, shape in shapes:
        if shape == "text":
            raise ConfigError(
                f"answer_pattern needs answers, and {path} is of running text\n"
                "hint: data with a question and an answer a row, or leave answer_pattern out"
            )
