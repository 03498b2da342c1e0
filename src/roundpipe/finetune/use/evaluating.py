"""Score a result on data: its loss, and how many of its answers are right.

The loss goes through the same code, in the same batches, as an evaluation within a run; layers come
to the devices as they are needed, so size is no matter. Answers are generated greedily, the longest
questions first: what does not fit memory fails at once.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.positions import check_lengths
from roundpipe.finetune.model.vocabulary import pad_token_of, require_rows
from roundpipe.finetune.output.sample import Answerer
from roundpipe.finetune.run.batches import Rows, batches_of, cut_of
from roundpipe.finetune.run.evaluate import evaluate
from roundpipe.finetune.run.retry import Splitting
from roundpipe.finetune.use.opened import open_subject
from roundpipe.finetune.use.questions import interval, is_same, question_of
from roundpipe.finetune.use.subject import find_subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roundpipe.finetune.data.samples import Samples
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.signals import Stop
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.opened import Opened
    from roundpipe.finetune.use.questions import AnswerPattern, Question
    from roundpipe.finetune.use.subject import Subject

MAX_NEW_TOKENS = 256
ANSWERS_AT_ONCE = 16


@dataclass(frozen=True)
class Loss:
    """Of a result on samples. ``loss``: mean per trained token, in nats; NaN without any.

    ``tokens``: of the ``samples`` that were seen, without padding; ``trained``: those of them that
    count; ``is_whole``: all samples were seen.
    """

    loss: float
    samples: int
    tokens: int
    trained: int
    seconds: float
    is_whole: bool = True

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is more than a float holds."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def tokens_per_second(self) -> float:
        """Of all tokens, trained or not."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Asked:
    """A question that has an answer: ``wanted`` is what counts of its reference."""

    question: Question
    wanted: str
    row: int


@dataclass(frozen=True)
class Answered:
    """What a model answered; ``found``: what counts of it, if there is anything that does."""

    asked: Asked
    answer: str
    found: str | None

    @property
    def is_match(self) -> bool:
        """Whether it is the reference's answer."""
        return self.found is not None and is_same(self.found, self.asked.wanted)


@dataclass(frozen=True)
class Answers:
    """What was answered, in the order of the data, of ``total`` questions."""

    given: Sequence[Answered]
    total: int
    seconds: float = 0.0

    @property
    def matches(self) -> int:
        """How many are right."""
        return sum(each.is_match for each in self.given)

    @property
    def found(self) -> int:
        """In how many there is anything that the pattern finds, right or not."""
        return sum(each.found is not None for each in self.given)

    @property
    def share(self) -> float:
        """Of those that were answered; NaN without any."""
        return self.matches / len(self.given) if self.given else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share lies of all that one might ask, with 95 % confidence."""
        return interval(self.matches, len(self.given))


@dataclass(frozen=True)
class Scores:
    """What a result came to. ``answers``: None where none were asked for, or it was stopped."""

    name: str
    loss: Loss
    answers: Answers | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out since somebody has stopped it."""
        return self.loss.is_whole and (
            self.answers is None or len(self.answers.given) == self.answers.total
        )


@dataclass(frozen=True)
class Exam:
    """What a result is scored on, and how. ``asked``: questions, where a ``pattern`` is given."""

    samples: Samples
    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    asked: Sequence[Asked] = ()
    pattern: AnswerPattern | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    at_once: int = ANSWERS_AT_ONCE


def evaluate_subject(
    subject: Subject,
    exam: Exam,
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
    stop: Stop,
) -> Scores:
    """Open a result and score it; blocks. A signal ends it after the batch that is under way.

    Raises ConfigError for a result that cannot be opened or cannot take the data, StepError and
    DeviceError where a device fails.
    """
    opening = open_subject(
        subject, exam.config, terminal, environment=environment, tokenizer=exam.tokenizer
    )
    with opening as opened, stop.patient(lambda name: terminal.line(f"{name} ending this batch …")):
        loss = loss_of(opened, exam, terminal, should_stop=lambda: stop.is_asked)
        answers = None
        if exam.pattern is not None and not stop.is_asked:
            # Answers may take hours, and fail.
            terminal.line(f"loss {loss.loss:.4f}, perplexity {loss.perplexity:.4g}")
            answers = answers_of(opened, exam, terminal, should_stop=lambda: stop.is_asked)
    return Scores(subject.name, loss, answers)


def base_of(subject: Subject, terminal: Terminal) -> Subject:
    """What a result was trained from. Raises ConfigError for a model that nobody says that of."""
    if subject.adapter is not None:
        return replace(
            subject, given=subject.source.given, adapter=None, run=None, folder=None, base_mark=None
        )
    if subject.config is None:
        raise ConfigError(
            f"compare=base: no adapter, and no run of roundpipe train: {subject.given}\n"
            "hint: leave compare out, or evaluate the other model with the same data"
        )
    return find_subject(subject.config.model_name_or_path, terminal)


def questions_in(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, pattern: AnswerPattern, *, told: str
) -> tuple[list[Asked], int]:
    """The questions of ``samples`` whose answer the pattern finds, and how many samples have none.

    Raises ConfigError where there is not one; ``told``: the data's name.
    """
    found = [(row, question_of(sample, tokenizer)) for row, sample in enumerate(samples)]
    questions = [(row, question) for row, question in found if question is not None]
    wanted = pattern.wanted([question for _, question in questions], told=told)
    asked = [
        Asked(question, answer, row)
        for (row, question), answer in zip(questions, wanted, strict=True)
        if answer is not None
    ]
    return asked, len(samples) - len(asked)


def loss_of(
    opened: Opened,
    exam: Exam,
    terminal: Terminal,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Loss:
    """Mean loss per trained token over the samples; blocks until it is known, or stopped.

    Raises ConfigError for samples that the model cannot take, StepError where one fails.
    """
    model, samples = opened.model.model, exam.samples
    check_lengths(model, samples.lengths, terminal.line)
    require_rows(model, exam.tokenizer, samples, opened.subject.source)
    config, splitting = exam.config, Splitting(exam.config.num_microbatch)
    batches = Rows(pad_token_of(exam.tokenizer, model), config.packing)
    done, started = 0, time.perf_counter()
    with terminal.counting(f"scoring {opened.subject.name}", len(samples), "samples") as show:

        def tell(rows: int) -> None:
            nonlocal done
            done = rows
            show(rows)

        found = evaluate(
            opened.model,
            batches_of(batches, samples, config.batch_size),
            run_config=functools.partial(cut_of, batches, config, splitting),
            should_stop=should_stop,
            tell=tell,
            splitting=splitting,
            say=terminal.line,
        )
    return Loss(
        loss=found.loss,
        samples=done,
        tokens=int(samples.lengths[:done].sum()),
        trained=found.tokens,
        seconds=time.perf_counter() - started,
        is_whole=found.is_whole,
    )


def answers_of(
    opened: Opened,
    exam: Exam,
    terminal: Terminal,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Answers:
    """Have every question answered, some at a time; blocks until all are, or it is stopped.

    Raises DeviceError where that many do not fit a device.
    """
    assert exam.pattern is not None
    order = sorted(exam.asked, key=lambda each: len(each.question.prompt), reverse=True)
    answerer = Answerer(
        opened.model,
        exam.tokenizer,
        max_new_tokens=exam.max_new_tokens,
        batch_size=exam.at_once,
    )
    terminal.line(answerer.outlook_line([each.question.prompt for each in order]))
    given: list[Answered] = []
    started = time.perf_counter()
    with terminal.counting(f"asking {opened.subject.name}", len(order), "questions") as show:
        for start in range(0, len(order), exam.at_once):
            show(start)
            batch = order[start : start + exam.at_once]
            texts = answerer.answers(
                [each.question.prompt for each in batch], should_stop=should_stop
            )
            if should_stop():  # these may be cut off
                break
            given += [
                Answered(each, text, exam.pattern.find(text))
                for each, text in zip(batch, texts, strict=True)
            ]
        show(len(given))
    terminal.line(answerer.rate_line())
    given.sort(key=lambda each: each.asked.row)
    return Answers(given, len(order), time.perf_counter() - started)
