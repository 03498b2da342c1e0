"""What a row means: a conversation, a plain text, or tokens; told from its columns.

Each shape is a set of columns that must be there. The first shape in the table whose columns are
all there is the row's, unless the dataset's entry names one. Rows with a prompt and an answer in
strings become a conversation of two messages and keep the plain pair beside it, for a model without
a chat template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError
from roundpipe.finetune.data.conversation import Conversation, Message, conversation_of, tools_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Text:
    """Running text, trained from end to end."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that somebody tokenised; -100 in ``labels`` where not trained."""

    input_ids: list[int]
    labels: list[int]


SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "question/answer": ("question", "answer"),
    "query/response": ("query", "response"),
    "text": ("text",),
    "input_ids": ("input_ids",),
}
_OPTIONAL = {
    "messages": ("tools",),
    "conversations": ("system", "tools"),
    "instruction/output": ("input", "system", "history"),
    "input_ids": ("labels", "attention_mask"),
    "text": (),
}
_REFUSED = {
    ("chosen", "rejected"): "preference pairs (dpo)",
    ("image",): "images",
    ("images",): "images",
    ("video",): "videos",
    ("audio",): "sound",
}


def shape_of(columns: Iterable[str], *, wanted: str | None = None) -> str:
    """The name of the shape that a row with these columns has. Raises DataError for none."""
    found = list(columns)
    for refused, what in _REFUSED.items():
        if wanted is None and all(column in found for column in refused):
            raise DataError(
                f"not supported: {what}, in columns {', '.join(found)}"
                f"\nhint: a dataset of one of these shapes: {_known()}"
            )
    if wanted is not None:
        missing = [column for column in SHAPES[wanted] if column not in found]
        if missing:
            raise DataError(
                f"no column {', '.join(missing)}; there are: {', '.join(found) or 'none'}"
                f"\nhint: {_mapping(missing[0], found)}"
            )
        return wanted
    for name, required in SHAPES.items():
        if all(column in found for column in required):
            return name
    raise DataError(
        f"no known shape: columns {', '.join(found) or 'none'}"
        f"\nhint: one of {_known()}, or a mapping: {_mapping('question', found)}"
    )


def unused_columns(shape: str, columns: Iterable[str]) -> list[str]:
    """The columns of a file that its shape does not read."""
    used = (*SHAPES[shape], *_OPTIONAL.get(shape, ("system",)))
    return [column for column in columns if column not in used]


def map_columns(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Mapping[str, Any]:
    """The row under our column names, only the mapped ones. Raises DataError if one is missing."""
    if columns is None:
        return row
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        raise DataError(
            f"no column {', '.join(missing)}; there are: {', '.join(row) or 'none'}"
            f"\nhint: {_mapping(next(iter(columns)), list(row))}"
        )
    return {ours: row[theirs] for ours, theirs in columns.items()}


def understand(row: Mapping[str, Any], shape: str) -> Conversation | Text | Tokens:
    """What a row of ``shape`` means. Raises DataError naming the column that cannot be used."""
    return _READERS[shape](row)


def _string(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise DataError(
            f"{column} is not a string: {json.dumps(value, default=str)[:60]}"
            "\nhint: write numbers in quotes, or on_bad_line=skip"
        )
    return value


def _pair(
    row: Mapping[str, Any], asked: str, answered: str, *, plain_prompt: str | None = None
) -> Conversation:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    prompt = f"{asked}\n" if plain_prompt is None else plain_prompt
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _string(row, "system")})
        prompt = f"{row['system']}\n{prompt}"
    return Conversation(messages, [True] * len(messages), plain=(prompt, answered))


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    asked = _string(row, "instruction")
    if row.get("input"):
        asked = f"{asked}\n{_string(row, 'input')}" if asked else _string(row, "input")
    pair = _pair(row, asked, _string(row, "output"))
    past: list[Message] = []
    for turn in row.get("history") or ():
        if not (isinstance(turn, list) and [type(part) for part in turn] == [str, str]):
            raise DataError("history is not a list of [question, answer]\nhint: on_bad_line=skip")
        past += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    if not past:
        return pair
    first = len(pair.messages) - 2
    messages = [*pair.messages[:first], *past, *pair.messages[first:]]
    return Conversation(messages, [True] * len(messages))


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    conversation = conversation_of(row["conversations"], tools=tools_of(row))
    if not row.get("system"):
        return conversation
    system = {"role": "system", "content": _string(row, "system")}
    return Conversation(
        [system, *conversation.messages], [True, *conversation.trained], conversation.tools
    )


def _message_pair(row: Mapping[str, Any]) -> Conversation:
    """Messages of a prompt, never trained, and of its completion."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    asked, answered = conversation_of(prompt), conversation_of(completion, tools=tools_of(row))
    return Conversation(
        asked.messages + answered.messages,
        [False] * len(asked.messages) + answered.trained,
        answered.tools,
    )


def _tokens(row: Mapping[str, Any]) -> Tokens:
    ids, labels = row["input_ids"], row.get("labels") or row["input_ids"]
    if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in (ids, labels)):
        raise DataError("input_ids or labels is not a list of integers\nhint: on_bad_line=skip")
    if len(ids) != len(labels):
        raise DataError(f"{len(ids)} input_ids but {len(labels)} labels\nhint: on_bad_line=skip")
    mask = row.get("attention_mask") or [1] * len(ids)
    kept = [i for i, real in enumerate(mask) if real]
    return Tokens([ids[i] for i in kept], [labels[i] for i in kept])


def _two_columns(row: Mapping[str, Any], asked: str, answered: str) -> Conversation:
    return _pair(row, _string(row, asked), _string(row, answered))


def _prompted(row: Mapping[str, Any]) -> Conversation:
    if not isinstance(row["prompt"], str):
        return _message_pair(row)
    prompt = _string(row, "prompt")
    return _pair(row, prompt, _string(row, "completion"), plain_prompt=prompt)


_READERS: dict[str, Callable[[Mapping[str, Any]], Conversation | Text | Tokens]] = {
    "messages": lambda row: conversation_of(row["messages"], tools=tools_of(row)),
    "conversations": _sharegpt,
    "prompt/completion": _prompted,
    "instruction/output": _alpaca,
    "question/answer": lambda row: _two_columns(row, "question", "answer"),
    "query/response": lambda row: _two_columns(row, "query", "response"),
    "text": lambda row: Text(_string(row, "text")),
    "input_ids": _tokens,
}


def _known() -> str:
    return " · ".join(", ".join(columns) for columns in SHAPES.values())


def _mapping(ours: str, found: list[str]) -> str:
    theirs = found[0] if found else "COLUMN"
    return f"dataset='{{path: FILE, columns: {{{ours}: {theirs}, …}}}}'"
