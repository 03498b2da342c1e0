"""``roundpipe eval RUN``: the loss of a result on data, and how many of its answers are right."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.signals import leave_at_once, listening
from roundpipe.finetune.use.eval_wish import OPTIONS, EvalWords, eval_wish
from roundpipe.finetune.use.request import read_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roundpipe.finetune.run.signals import Stop
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.eval_wish import EvalWish
    from roundpipe.finetune.use.evaluating import Exam, Scores
    from roundpipe.finetune.use.request import Request

_USAGE = "roundpipe eval RUN [dataset=FILE] [answer_pattern=REGEX] [key=value …]"


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command. Raises ConfigError, and `Stopped` once what was reached is shown."""
    words = EvalWords.of(arguments)
    with listening(leave_at_once) as stop:
        request = read_request(
            words.rest,
            options=OPTIONS,
            taken=("answer_pattern",),
            environment=environment,
            usage=_USAGE,
        )
        wish = eval_wish(request, words)
        terminal = Terminal(sys.stderr)
        for note in request.notes:
            terminal.line(note)
        _score(request, wish, terminal, environment, stop)
        stop.check()
    return 0


def _score(
    request: Request,
    wish: EvalWish,
    terminal: Terminal,
    environment: Mapping[str, str],
    stop: Stop,
) -> None:
    from roundpipe.finetune.use.scored_data import load_scored, scored_config  # noqa: PLC0415

    with terminal.waiting("starting torch"):
        from roundpipe.finetune.use.evaluating import base_of, evaluate_subject  # noqa: PLC0415
        from roundpipe.finetune.use.opened import open_tokenizer  # noqa: PLC0415
        from roundpipe.finetune.use.subject import find_subject  # noqa: PLC0415
    subject = find_subject(request.given, terminal, base=request.base)
    config = scored_config(request.settings, wish.choice)
    subjects = [subject]
    if wish.with_base:
        subjects.insert(0, base_of(subject, terminal))
    tokenizer = open_tokenizer(subject, config, terminal)
    data = load_scored(config, wish.choice, tokenizer, terminal, environment=environment)
    exam = _exam(data, config, tokenizer, wish, terminal)
    scores: list[Scores] = []
    try:
        for each in subjects:
            scores.append(
                evaluate_subject(each, exam, terminal, environment=environment, stop=stop)
            )
            if stop.is_asked:
                break
    finally:
        if scores:
            _show(scores, data.name, exam, wish)


def _exam(
    data: Any, config: TrainConfig, tokenizer: Any, wish: EvalWish, terminal: Terminal
) -> Exam:
    """What is asked; says what is to be known of it."""
    from roundpipe.finetune.use.evaluating import (  # noqa: PLC0415
        ANSWERS_AT_ONCE,
        MAX_NEW_TOKENS,
        Exam,
        questions_in,
    )
    from roundpipe.finetune.use.questions import refuse_shapes  # noqa: PLC0415

    terminal.line(f"{data.stats} · {data.name}")
    for line in data.lines:
        terminal.line(line)
    exam = Exam(data.samples, config, tokenizer, pattern=wish.pattern)
    if wish.pattern is None:
        return exam
    refuse_shapes(data.shapes)
    asked, without = questions_in(data.samples, tokenizer, wish.pattern, told=data.name)
    if without:
        terminal.line(
            f"{without:,} of {len(data.samples):,} samples are not asked: their own answer has "
            "nothing that answer_pattern finds"
        )
    return replace(
        exam,
        asked=asked,
        max_new_tokens=wish.max_new_tokens or MAX_NEW_TOKENS,
        at_once=wish.at_once or ANSWERS_AT_ONCE,
    )


def _show(scores: Sequence[Scores], data: str, exam: Exam, wish: EvalWish) -> None:
    from roundpipe.finetune.use.score_text import answer_lines  # noqa: PLC0415

    try:
        _print(scores, data, wish)
    finally:  # answers took long to make: they are kept even where stdout takes nothing
        if wish.output is not None:
            lines = answer_lines(scores, exam.tokenizer)
            _keep(wish.output, "".join(f"{line}\n" for line in lines))


def _keep(output: Path, text: str) -> None:
    """Write answers where they are wanted; raises ConfigError that says where they are else."""
    try:
        write_text(output, text)
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        raise ConfigError(
            f"output: cannot be written: {output}: {why}\nhint: {_rescued(text)}"
        ) from problem


def _rescued(text: str) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="answers-", suffix=".jsonl", delete=False
        ) as file:
            file.write(text)
    except OSError:
        return "make room there and give the command again"
    return f"the answers are in {file.name}"


def _print(scores: Sequence[Scores], data: str, wish: EvalWish) -> None:
    from roundpipe.finetune.use.score_text import score_lines, score_values  # noqa: PLC0415

    if wish.as_json:
        values = {"data": data, "scores": [score_values(each) for each in scores]}
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(score_lines(scores)))
