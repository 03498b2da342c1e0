"""The chat template of a tokenizer: which one, and what it writes.

A template is a program that comes with a model. It runs in the sandbox of transformers, and one
that names anything of Python's inside is refused before it runs. It may ask for the date: it is
always told the same one, so that the same data is the same tokens tomorrow, when an interrupted
run goes on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from roundpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.data.conversation import Conversation

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The date that Llama 3 writes where it is not told one.
_DATE = {"%Y": "2024", "%y": "24", "%B": "July", "%b": "Jul", "%m": "07", "%d": "26", "%-d": "26"}
_DATE |= {"%A": "Friday", "%a": "Fri", "%j": "208", "%H": "00", "%M": "00", "%S": "00"}
_TELL_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f".replace('{code}', '{text}')" for code, text in _DATE.items())
    + " }}{%- endmacro -%}"
)
_INSIDE = re.compile(r"(^|[.\[])__\w+")  # names that Python keeps for itself
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def use_chat_template(tokenizer: Any, choice: str) -> None:
    """Set the tokenizer's chat template to ``choice``: auto leaves the model's own.

    The tokenizer is changed, so that what is saved is what was trained with. Raises ConfigError,
    also for a template that is broken or reaches for what it may not touch.
    """
    _set_template(tokenizer, choice)
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        if text:
            is_own = choice in ("auto", "chatml")
            _refuse_hostile(text, name_of(tokenizer) if is_own else _first_line(choice))


def use_special_tokens(tokenizer: Any, given: Mapping[str, str | Sequence[str]] | None) -> None:
    """Check that the tokenizer has these tokens, and end texts with ``eos_token`` if it is given.

    Nothing is added to a vocabulary. Raises ConfigError for a token that is not in it, and for
    another token in a part that the tokenizer's own rules go by.
    """
    for part, named in (given or {}).items():
        for token in [named] if isinstance(named, str) else named:
            if tokenizer.encode(token, add_special_tokens=False) != [_id_of(token, tokenizer)]:
                raise ConfigError(
                    f"no token of {name_of(tokenizer)}: special_tokens: {part}: {token}"
                    "\nhint: special_tokens=none, or a model whose tokenizer has it; no token is "
                    "added to a vocabulary"
                )
        own = getattr(tokenizer, part, None)
        if part == "additional_special_tokens" or own == named:
            continue
        if part != "eos_token":
            raise ConfigError(
                f"special_tokens: {part}: {named} is not what {name_of(tokenizer)} has there: {own}"
                "\nhint: special_tokens=none, or eos_token alone"
            )
        tokenizer.eos_token = named


def _id_of(token: str, tokenizer: Any) -> int | None:
    found: int | None = tokenizer.get_vocab().get(token)
    return found


def _first_line(choice: str) -> str:
    """A choice for messages: it may be a whole template."""
    return choice.strip().partition("\n")[0][:60]


def _set_template(tokenizer: Any, choice: str) -> None:
    if choice == "auto":
        return
    if "{%" in choice or "{{" in choice:
        tokenizer.chat_template = choice
        return
    if choice == "chatml":
        tokenizer.chat_template = CHATML
        return
    path = Path(choice).expanduser()
    if path.suffix in (".jinja", ".jinja2", ".j2"):
        tokenizer.chat_template = _read(path, choice)
        return
    template = _in_folder(path, choice) if path.is_dir() else _of_model(choice)
    if not template:
        raise ConfigError(
            f"no chat template there: chat_template: {choice}\nhint: chat_template=chatml"
        )
    tokenizer.chat_template = template


def _read(path: Path, choice: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as problem:
        why = getattr(problem, "strerror", None) or "not UTF-8"
        raise ConfigError(
            f"cannot read chat_template: {choice}: {why.lower()}"
            "\nhint: chat_template=auto uses the model's own"
        ) from problem


def _in_folder(folder: Path, choice: str) -> Any:
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read(file, choice)
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        try:
            template = json.loads(_read(settings, choice)).get("chat_template")
        except (ValueError, AttributeError) as problem:
            raise ConfigError(
                f"broken JSON: chat_template: {settings}\nhint: chat_template=FILE.jinja"
            ) from problem
        if isinstance(template, list):  # several, by name, as they were once written
            return {entry["name"]: entry["template"] for entry in template}
        return template
    return None


def _of_model(name: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415, seconds to import and rarely needed

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False).chat_template
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"no such model: chat_template: {name}\nhint: chat_template=auto, chatml, or FILE.jinja"
        ) from problem


def _refuse_hostile(template: str, name: str) -> None:
    """Raise ConfigError for a template that cannot be read, or that names Python's own insides.

    The sandbox turns most of these to nothing; a template that tries is not one to train with.
    """
    try:
        for line, kind, value in Environment(autoescape=False).lex(template):
            if kind in ("name", "string") and _INSIDE.search(value.strip("\"'")):
                raise ConfigError(
                    f"the chat template of {name} reaches for what a template may not touch: "
                    f"{value} in line {line}\nhint: chat_template=chatml, or FILE.jinja"
                )
    except TemplateSyntaxError as problem:
        raise _broken(name, problem) from problem


def _broken(name: str, problem: TemplateSyntaxError) -> ConfigError:
    return ConfigError(
        f"the chat template of {name} is broken: line {problem.lineno}: {problem.message}"
        "\nhint: chat_template=chatml, or FILE.jinja"
    )


def name_of(tokenizer: Any) -> str:
    """The model's name or folder, for messages."""
    return getattr(tokenizer, "name_or_path", "") or "this tokenizer"


class ChatTemplate:
    """What a tokenizer's template writes of one conversation."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        self._tokenizer = tokenizer
        self._conversation = conversation
        self.source: str = tokenizer.get_chat_template(None, conversation.tools)
        if "strftime_now" in self.source:
            self.source = _TELL_DATE + self.source

    def has(self, name: str) -> bool:
        """Whether the template speaks of a part of a conversation, such as ``tools``, at all."""
        return name in self.source

    def write(self, count: int, *, ask: bool = False) -> str:
        """The first ``count`` messages as text, with the header for an answer where ``ask``.

        Raises DataError where the template refuses them, ConfigError where it cannot be used.
        """
        return str(
            self._guarded(
                self._tokenizer.apply_chat_template,
                self._conversation.messages[:count],
                tools=self._conversation.tools,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=ask,
            )
        )

    def marks(self, count: int) -> list[tuple[int, int]]:
        """Characters (start, end) that the template marks as generated, in order; often none."""
        if not _MARKS.search(self.source):
            return []
        from transformers.utils.chat_template_utils import (  # noqa: PLC0415, as is torch
            render_jinja_template,
        )

        _, marks = self._guarded(
            render_jinja_template,
            [self._conversation.messages[:count]],
            tools=self._conversation.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in marks[0] if end > start]

    def _guarded(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``run`` returns; an error of the template as ours."""
        try:
            return run(*args, **kwargs)
        except SecurityError as problem:
            raise ConfigError(
                f"the chat template of {name_of(self._tokenizer)} reaches for what a template may "
                f"not touch: {problem}\nhint: chat_template=chatml, or FILE.jinja"
            ) from problem
        except TemplateSyntaxError as problem:
            raise _broken(name_of(self._tokenizer), problem) from problem
        # A template may do anything with a row, and fail in any way on what it did not expect.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as problem:
            why = " ".join(str(problem).split()) or type(problem).__name__
            raise DataError(
                f"the chat template refuses the conversation: {why}\nhint: on_bad_line=skip"
            ) from problem
