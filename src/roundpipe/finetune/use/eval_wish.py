"""What `roundpipe eval` was asked for, beside RUN and the keys of a config. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.use.options import flag, is_beside_base, take_texts, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.finetune.use.questions import AnswerPattern
    from roundpipe.finetune.use.request import Request

OPTIONS = ("max_samples", "split", "max_new_tokens", "output", "compare", "json")
_PATTERN = "answer_pattern"
_EXAMPLE = "'#### ([-0-9.,]+)'"
_DRAWS = ("temperature", "top_p", "top_k", "do_sample", "num_beams", "repetition_penalty")
_KEY = re.compile(r"(--)?([A-Za-z_][\w-]*)(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """What of the data was said with the command.

    ``is_named``: a dataset was; ``is_held_out``: a ``val_size`` was. ``split``: of each dataset;
    ``most``: how many samples, the first ones.
    """

    is_named: bool = False
    is_held_out: bool = False
    split: str | None = None
    most: int | None = None


@dataclass(frozen=True)
class EvalWish:
    """``pattern``: None where no answers are asked for; ``at_once``: how many are made together;
    ``output``: the file that they go to.
    """

    choice: Choice
    pattern: AnswerPattern | None = None
    max_new_tokens: int | None = None
    at_once: int | None = None
    output: Path | None = None
    with_base: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class EvalWords:
    """A command line read as far as `read_request` leaves it: ``rest`` is for that.

    ``names``: of all keys, as we call them; ``pattern``: as it stands, since in YAML a bracket is a
    list.
    """

    rest: list[str]
    names: frozenset[str]
    pattern: str | None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> EvalWords:
        """Read a command line; ``eval_dataset`` becomes ``dataset``: here both are what is scored.

        Raises ConfigError.
        """
        left, texts = take_texts(arguments, {_PATTERN: _EXAMPLE})
        rest, names = [], set()
        for word in left:
            found = _KEY.fullmatch(word)
            if found is None or not (found[1] or found[3]):
                rest.append(word)
                continue
            name = found[2].replace("-", "_")
            name = keys.ALIASES.get(name, name)
            is_data = name == "eval_dataset"
            names.add("dataset" if is_data else name)
            rest.append(f"{found[1] or ''}dataset{found[3] or ''}" if is_data else word)
        return cls(rest, frozenset(names), next(reversed(texts[_PATTERN]), None))


def eval_wish(request: Request, words: EvalWords) -> EvalWish:
    """The wish that these values make. Raises ConfigError for one that means nothing.

    Makes the folder of ``output``, and an empty file: answers may take hours, so it is found out
    now whether that can be written.
    """
    from roundpipe.finetune.use.questions import AnswerPattern  # noqa: PLC0415 (numpy)

    options = request.options
    pattern = None if words.pattern is None else AnswerPattern(words.pattern)
    if pattern is not None and request.settings.train_on_prompt:
        raise ConfigError(
            "answer_pattern needs answers that are told from questions: train_on_prompt=true\n"
            "hint: train_on_prompt=false"
        )
    if pattern is None:
        for name in ("output", "max_new_tokens"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"{name} is of answers, and none are asked for\n"
                    f"hint: answer_pattern={_EXAMPLE} beside it"
                )
    drawn = next((name for name in _DRAWS if name in words.names), None)
    if pattern is not None and drawn is not None:
        raise ConfigError(
            f"answers are greedy where they are counted: {drawn}\n"
            "hint: leave it out; `roundpipe chat` draws"
        )
    split = options.get("split")
    return EvalWish(
        Choice(
            is_named="dataset" in words.names,
            is_held_out="val_size" in words.names,
            split=None if split is None else str(split),
            most=whole(options, "max_samples", least=1, such_as=200),
        ),
        pattern,
        max_new_tokens=whole(options, "max_new_tokens", least=1, such_as=200),
        at_once=request.settings.batch_size if "batch_size" in words.names else None,
        with_base=is_beside_base(options),
        as_json=flag(options, "json"),
        output=_file(options.get("output")),
    )


def _file(given: Any) -> Path | None:
    if given is None:
        return None
    if isinstance(given, bool) or not Path(str(given)).name:
        raise ConfigError("output names no file\nhint: output=answers.jsonl")
    path = Path(str(given)).expanduser()
    if path.is_dir():
        raise ConfigError(f"output: a folder: {given}\nhint: output={given}/answers.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        raise ConfigError(
            f"output: cannot be written: {path}: {why}\nhint: output=answers.jsonl"
        ) from problem
    return path
