"""A conversation as text, and where in that text the answers stand.

Spans are found by position. With R(k) the rendering of the first k messages and R+(k) the same with
the header that asks for an answer, the answer in message k is what R(k+1) has beyond R+(k):

    R+(k)    <user>How many?</user><assistant>
    R(k+1)   <user>How many?</user><assistant>There are 12.</assistant>
    all      <user>How many?</user><assistant>There are 12.</assistant><user>Why?</user> …

Both must be beginnings of the whole text. A template that writes an earlier turn differently once
another follows (it drops old reasoning, say) has no such span: training there would teach something
that is never asked for, so it is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from roundpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roundpipe.finetune.data.conversation import Conversation

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text with the spans (start, end) of characters that are trained, in order.

    ``ends_open`` says that the last trained turn has no end token in the text, so that one must be
    put behind it; ``add_special_tokens`` whether the tokenizer is to add its own.
    """

    text: str
    spans: list[tuple[int, int]]
    ends_open: bool
    add_special_tokens: bool


def use_chat_template(tokenizer: Any, choice: str) -> None:
    """Set the tokenizer's chat template to ``choice``: auto leaves the model's own.

    The tokenizer is changed, so that what is saved is what was trained with. Raises ConfigError.
    """
    if choice == "auto":
        return
    if choice == "chatml":
        tokenizer.chat_template = CHATML
        return
    path = Path(choice).expanduser()
    if path.suffix in (".jinja", ".j2"):
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except OSError as problem:
            raise ConfigError(
                f"cannot read chat_template: {choice}: {(problem.strerror or 'error').lower()}"
                "\nhint: chat_template=auto uses the model's own"
            ) from problem
        return
    template = _in_folder(path) if path.is_dir() else _of_model(choice)
    if not template:
        raise ConfigError(
            f"no chat template there: chat_template: {choice}\nhint: chat_template=chatml"
        )
    tokenizer.chat_template = template


def _in_folder(folder: Path) -> Any:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        return json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    return None


def _of_model(name: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415, seconds to import and rarely needed

    try:
        return AutoTokenizer.from_pretrained(name).chat_template
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"no such model: chat_template: {name}\nhint: chat_template=auto, chatml, or FILE.jinja"
        ) from problem


def render(
    conversation: Conversation, tokenizer: Any, *, everything: bool, only_last: bool
) -> Rendered:
    """Write a conversation as the model's template does and find what of it is trained.

    ``everything`` trains the prompt too, ``only_last`` the last answer alone. Raises DataError
    where the template refuses the row, ConfigError where it cannot be trained with at all.
    """
    if not tokenizer.chat_template:
        return _concatenate(conversation, everything=everything)

    @cache
    def write(count: int, *, ask: bool = False) -> str:
        return _apply(tokenizer, conversation, count, ask=ask)

    messages, total = conversation.messages, len(conversation.messages)
    whole = write(total)
    answers = [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and conversation.trained[i]
    ]
    ends = _end_tokens(tokenizer)
    if everything:
        spans = [(0, len(whole))]
    else:
        chosen = answers[-1:] if only_last else answers
        spans = [_span(i, whole, write, tokenizer) for i in chosen]
        spans = [(start, _turn_end(whole, start, end, ends)) for start, end in spans]
    ends_open = bool(answers) and answers[-1] == total - 1 and not _is_ended(whole, ends)
    return Rendered(whole, spans, ends_open, add_special_tokens=False)


def _apply(tokenizer: Any, conversation: Conversation, count: int, *, ask: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages[:count],
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=ask,
        )
    except TemplateError as problem:
        why = " ".join(str(problem).split()) or type(problem).__name__
        raise DataError(
            f"the chat template refuses the conversation: {why}\nhint: on_bad_line=skip"
        ) from problem
    return str(text)


def _span(index: int, whole: str, write: Callable[..., str], tokenizer: Any) -> tuple[int, int]:
    """The characters of answer ``index``, its end token included."""
    if index == 0:
        raise DataError(
            "the conversation starts with an answer, which nothing asks for"
            "\nhint: on_bad_line=skip, or mask_history=true"
        )
    before, after = write(index, ask=True), write(index + 1)
    if whole.startswith(before) and whole.startswith(after) and len(after) > len(before):
        return len(before), len(after)
    raise ConfigError(_rewrites(index, whole, before, tokenizer))


def _rewrites(index: int, whole: str, before: str, tokenizer: Any) -> str:
    name = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
    if whole.startswith(before):
        return (
            f"the chat template of {name} writes answer {index + 1} differently once more messages "
            "follow, so what to train cannot be told by position"
            "\nhint: mask_history=true trains each last answer, or chat_template=chatml"
        )
    return (
        f"the chat template of {name} asks for an answer with other text than it writes before "
        f"message {index + 1}, so what to train cannot be told by position"
        "\nhint: chat_template=chatml, or a template of your own: chat_template=FILE.jinja"
    )


def _end_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Text of every token that is special; never a word that an answer may end in."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special: Iterable[str] = (str(token) for token in added if getattr(token, "special", False))
    return tuple({*special, *map(str, tokenizer.all_special_tokens)})


def _turn_end(whole: str, start: int, end: int, ends: tuple[str, ...]) -> int:
    """Where a turn's end token ends: white space behind it belongs to the template."""
    turn = whole[start:end].rstrip()
    return start + len(turn) if turn.endswith(ends) else end


def _is_ended(whole: str, ends: tuple[str, ...]) -> bool:
    return whole.rstrip().endswith(ends)


def _concatenate(conversation: Conversation, *, everything: bool) -> Rendered:
    """Prompt and completion as they stand, for a tokenizer without chat template."""
    if conversation.plain is None or "tool_calls" in conversation.messages[-1]:
        raise ConfigError(
            "the tokenizer has no chat template to write messages with"
            "\nhint: chat_template=chatml, or a dataset of prompt and completion strings"
        )
    prompt, completion = conversation.plain
    text = prompt + completion
    start = 0 if everything else len(prompt)
    return Rendered(text, [(start, len(text))], ends_open=True, add_special_tokens=True)
