"""``roundpipe eval RUN``: the loss of a result on data, and how many of its answers are right."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.signals import leave_at_once, listening
from roundpipe.finetune.settings import keys
from roundpipe.finetune.use.request import read_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roundpipe.finetune.run.signals import Stop
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.evaluating import Exam, Scores
    from roundpipe.finetune.use.questions import AnswerPattern
    from roundpipe.finetune.use.request import Request
    from roundpipe.finetune.use.scored_data import Choice

_OPTIONS = ("max_samples", "split", "max_new_tokens", "output", "compare", "json")
_USAGE = "roundpipe eval RUN [dataset=FILE] [answer_pattern=REGEX] [key=value …]"
_PATTERN = "answer_pattern"


@dataclass(frozen=True)
class Wanted:
    """The command's own options; ``pattern``: None where no answers are asked for."""

    choice: Choice
    pattern: AnswerPattern | None
    max_new_tokens: int | None
    at_once: int | None
    output: Path | None
    with_base: bool
    as_json: bool


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command. Raises ConfigError, and `Stopped` once what was reached is shown."""
    words, names, pattern = _own_words(arguments)
    with listening(leave_at_once) as stop:
        request = read_request(words, options=_OPTIONS, environment=environment, usage=_USAGE)
        wanted = _wanted(request, names, pattern)
        terminal = Terminal(sys.stderr)
        for note in request.notes:
            terminal.line(note)
        _score(request, wanted, terminal, environment, stop)
        stop.check()
    return 0


def _score(
    request: Request,
    wanted: Wanted,
    terminal: Terminal,
    environment: Mapping[str, str],
    stop: Stop,
) -> None:
    from roundpipe.finetune.use.scored_data import load_scored, scored_config  # noqa: PLC0415

    with terminal.waiting("starting torch"):
        from roundpipe.finetune.use.evaluating import base_of, evaluate_subject  # noqa: PLC0415
        from roundpipe.finetune.use.opened import open_tokenizer  # noqa: PLC0415
        from roundpipe.finetune.use.subject import find_subject  # noqa: PLC0415
    subject = find_subject(request.given, terminal, environment=environment, base=request.base)
    config = scored_config(request.settings, wanted.choice)
    subjects = [subject]
    if wanted.with_base:
        subjects.insert(0, base_of(subject, terminal, environment=environment))
    tokenizer = open_tokenizer(subject, config, terminal)
    data = load_scored(config, wanted.choice, tokenizer, terminal, environment=environment)
    exam = _exam(data, config, tokenizer, wanted, terminal)
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
            _show(scores, data.name, exam, wanted)


def _exam(
    data: Any, config: TrainConfig, tokenizer: Any, wanted: Wanted, terminal: Terminal
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
    exam = Exam(data.samples, config, tokenizer, pattern=wanted.pattern)
    if wanted.pattern is None:
        return exam
    refuse_shapes(data.shapes)
    asked, without = questions_in(data.samples, tokenizer, wanted.pattern, told=data.name)
    if without:
        terminal.line(
            f"{without:,} of {len(data.samples):,} samples are not asked: their own answer has "
            "nothing that answer_pattern finds"
        )
    return replace(
        exam,
        asked=asked,
        max_new_tokens=wanted.max_new_tokens or MAX_NEW_TOKENS,
        at_once=wanted.at_once or ANSWERS_AT_ONCE,
    )


def _show(scores: Sequence[Scores], data: str, exam: Exam, wanted: Wanted) -> None:
    from roundpipe.finetune.use.score_text import (  # noqa: PLC0415
        answer_lines,
        score_lines,
        score_values,
    )

    if wanted.as_json:
        values = {"data": data, "scores": [score_values(each) for each in scores]}
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(score_lines(scores)))
    if wanted.output is not None:
        lines = answer_lines(scores, exam.tokenizer)
        with _written(wanted.output):
            write_text(wanted.output, "".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        raise ConfigError(
            f"output: cannot be written: {path}: {why}\nhint: output=answers.jsonl"
        ) from problem


def _file(given: Any) -> Path | None:
    """Where answers go, its folder made: they may take hours, so it is found out now."""
    if given is None:
        return None
    if isinstance(given, bool) or not Path(str(given)).name:
        raise ConfigError("output names no file\nhint: output=answers.jsonl")
    path = Path(str(given)).expanduser()
    if path.is_dir():
        raise ConfigError(f"output: a folder: {given}\nhint: output={given}/answers.jsonl")
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return path


def _own_words(arguments: Sequence[str]) -> tuple[list[str], set[str], str | None]:
    """The words without the pattern, which is taken as it stands: in YAML a bracket is a list.

    ``eval_dataset`` becomes ``dataset``: here both are what is scored. Also the names of all keys,
    as we call them.
    """
    words: list[str] = []
    names: set[str] = set()
    pattern: str | None = None
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        found = re.fullmatch(r"(--)?([A-Za-z_][\w-]*)(=.*)?", word, re.DOTALL)
        if found is None or not (found[1] or found[3]):
            words.append(word)
            continue
        name = found[2].replace("-", "_")
        name = keys.ALIASES.get(name, name)
        if name == _PATTERN:
            if not found[3] and not waiting:
                raise ConfigError(f"answer_pattern says nothing\nhint: {_USAGE}")
            pattern = found[3][1:] if found[3] else waiting.pop(0)
            continue
        if name == "eval_dataset":
            name, word = "dataset", f"{found[1] or ''}dataset{found[3] or ''}"
        names.add(name)
        words.append(word)
    return words, names, pattern


def _wanted(request: Request, names: set[str], pattern: str | None) -> Wanted:
    from roundpipe.finetune.use.questions import AnswerPattern  # noqa: PLC0415
    from roundpipe.finetune.use.scored_data import Choice  # noqa: PLC0415

    options = request.options
    compiled = None if pattern is None else AnswerPattern(pattern)
    if compiled is not None and request.settings.train_on_prompt:
        raise ConfigError(
            "answer_pattern needs answers that are told from questions: train_on_prompt=true\n"
            "hint: train_on_prompt=false"
        )
    if compiled is None:
        for name in ("output", "max_new_tokens"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"{name} is of answers, and none are asked for\n"
                    "hint: answer_pattern='#### ([-0-9.,]+)' beside it"
                )
    if options.get("compare") not in (None, "base"):
        raise ConfigError(f"compare: not base: {options['compare']}\nhint: compare=base")
    if not isinstance(options.get("json", False), bool):
        raise ConfigError(f"neither true nor false: json={options['json']}\nhint: --json")
    split = options.get("split")
    return Wanted(
        Choice(
            is_named="dataset" in names,
            is_held_out="val_size" in names,
            split=None if split is None else str(split),
            most=_count(options, "max_samples"),
        ),
        compiled,
        max_new_tokens=_count(options, "max_new_tokens"),
        at_once=request.settings.batch_size if "batch_size" in names else None,
        output=_file(options.get("output")),
        with_base=options.get("compare") == "base",
        as_json=bool(options.get("json", False)),
    )


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"not a number from 1: {name}={value}\nhint: {name}=200")
    return value
