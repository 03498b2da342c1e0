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
from roundpipe.finetune.data.samples import IGNORED

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
    ("prompt", "completion", "label"): "answers that are rated (kto)",
    ("kto_tag",): "answers that are rated (kto)",
    ("image",): "images",
    ("images",): "images",
    ("video",): "videos",
    ("videos",): "videos",
    ("audio",): "sound",
    ("audios",): "sound",
}
# What `columns` may name inside of messages.
_FIELDS = ("role", "content")
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")


def shape_of(columns: Iterable[str], *, wanted: str | None = None) -> str:
    """The name of the shape that a row with these columns has. Raises DataError for none."""
    found = list(columns)
    for refused, what in _REFUSED.items():
        if wanted is None and all(column in found for column in refused):
            raise DataError(
                f"not supported: {what}, in columns {_some(found)}"
                f"\nhint: a dataset of one of these shapes: {_known()}; type: SHAPE beside path "
                "trains on what is text in it"
            )
    if wanted is not None:
        missing = [column for column in SHAPES[wanted] if column not in found]
        if missing:
            raise DataError(
                f"no column {', '.join(missing)}; there are: {_some(found)}"
                f"\nhint: {_mapping(missing[0], found)}"
            )
        return wanted
    for name, required in SHAPES.items():
        if all(column in found for column in required):
            return name
    raise DataError(
        f"no known shape: columns {_some(found)}"
        f"\nhint: one of {_known()}, or a mapping: {_mapping('question', found)}"
    )


def unused_columns(shape: str, columns: Iterable[str]) -> list[str]:
    """The columns of a file that its shape does not read."""
    used = _columns_of(shape)
    return [column for column in columns if column not in used]


def map_columns(
    row: Mapping[str, Any], columns: Mapping[str, str] | None, *, wanted: str | None = None
) -> Mapping[str, Any]:
    """The row under our column names: those that are mapped, and the others of their shape.

    ``role`` and ``content`` name the fields of messages. Raises DataError for a missing column.
    """
    if columns is None:
        return row
    inside = {ours: theirs for ours, theirs in columns.items() if ours in _FIELDS}
    outside = {ours: theirs for ours, theirs in columns.items() if ours not in _FIELDS}
    missing = [theirs for theirs in outside.values() if theirs not in row]
    if missing:
        raise DataError(
            f"no column {', '.join(missing)}; there are: {_some(row)}"
            f"\nhint: {_mapping(next(iter(columns)), list(row))}"
        )
    mapped = {ours: row[theirs] for ours, theirs in outside.items()}
    rest = {name: value for name, value in row.items() if name not in (*mapped, *outside.values())}
    shape = wanted or next((name for name in SHAPES if _completes(name, mapped, rest)), None)
    if shape is not None:
        mapped.update({name: rest[name] for name in _columns_of(shape) if name in rest})
    if inside:
        for name in _CONVERSATIONS:
            messages = json_in(mapped, name)
            if isinstance(messages, list):
                mapped[name] = [_renamed(message, inside) for message in messages]
    return mapped


def map_roles(row: Mapping[str, Any], roles: Mapping[Any, Iterable[str]]) -> Mapping[str, Any]:
    """The row with its messages' roles under our names; ``roles``: ours to theirs."""
    ours = {theirs: name for name, others in roles.items() for theirs in others}
    mapped = dict(row)
    for column in _CONVERSATIONS:
        messages = mapped[column] = json_in(row, column) if column in row else None
        if isinstance(messages, list):
            mapped[column] = [_with_role(message, ours) for message in messages]
        elif column not in row:
            del mapped[column]
    return mapped


def _with_role(message: Any, ours: Mapping[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    name = "role" if "role" in message else "from"
    role = message.get(name)
    return {**message, name: ours.get(role, role) if isinstance(role, str) else role}


def _columns_of(shape: str) -> tuple[str, ...]:
    return (*SHAPES[shape], *_OPTIONAL.get(shape, ("system",)))


def _completes(shape: str, mapped: Mapping[str, Any], rest: Mapping[str, Any]) -> bool:
    """Whether the mapped columns are of ``shape`` and the rest of the row has what they lack."""
    return set(mapped) <= set(_columns_of(shape)) and all(
        name in mapped or name in rest for name in SHAPES[shape]
    )


def _renamed(message: Any, inside: Mapping[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {name: value for name, value in message.items() if name not in inside.values()}
    found = {ours: message[theirs] for ours, theirs in inside.items() if theirs in message}
    return {**kept, **found}


def understand(row: Mapping[str, Any], shape: str) -> Conversation | Text | Tokens:
    """What a row of ``shape`` means. Raises DataError naming the column that cannot be used."""
    return _READERS[shape](row)


def json_in(row: Mapping[str, Any], column: str) -> Any:
    """A column whose lists are text in some files (CSV, some tables), decoded where it is text.

    Raises DataError.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None if value == "" else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"{column} is text that is no JSON: {value[:60]}\nhint: on_bad_line=skip"
        ) from problem


def _string(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise DataError(
            f"{column} is not a string: {json.dumps(value, default=_brief)[:60]}"
            "\nhint: write numbers in quotes, or on_bad_line=skip"
        )
    return value


def _brief(value: Any) -> str:
    return str(value)[:60]


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
    turns = json_in(row, "history") or ()
    if not isinstance(turns, list | tuple):
        raise DataError("history is not a list of [question, answer]\nhint: on_bad_line=skip")
    for turn in turns:
        if not (isinstance(turn, list) and [type(part) for part in turn] == [str, str]):
            raise DataError("history is not a list of [question, answer]\nhint: on_bad_line=skip")
        past += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    if not past:
        return pair
    first = len(pair.messages) - 2
    messages = [*pair.messages[:first], *past, *pair.messages[first:]]
    return Conversation(messages, [True] * len(messages))


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    conversation = conversation_of(json_in(row, "conversations"), tools=tools_of(row))
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
    ids = json_in(row, "input_ids")
    labels, mask = (json_in(row, name) for name in ("labels", "attention_mask"))
    given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    for name, values in given.items():
        if values is None and name != "input_ids":
            continue
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise DataError(f"{name} is not a list of integers\nhint: on_bad_line=skip")
        if len(values) != len(ids):
            raise DataError(
                f"{len(ids)} input_ids but {len(values)} {name}\nhint: on_bad_line=skip"
            )
    labels = ids if labels is None else labels
    wrong = next(
        (label for label in labels if not (label == IGNORED or 0 <= label < 1 << 31)), None
    )
    if wrong is not None:
        raise DataError(f"neither a token nor {IGNORED}: label {wrong}\nhint: on_bad_line=skip")
    if mask is None:
        return Tokens(ids, labels)
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
    "messages": lambda row: conversation_of(json_in(row, "messages"), tools=tools_of(row)),
    "conversations": _sharegpt,
    "prompt/completion": _prompted,
    "instruction/output": _alpaca,
    "question/answer": lambda row: _two_columns(row, "question", "answer"),
    "query/response": lambda row: _two_columns(row, "query", "response"),
    "text": lambda row: Text(_string(row, "text")),
    "input_ids": _tokens,
}


def _some(names: Iterable[str]) -> str:
    """Names for a message, not too many."""
    found = [str(name)[:40] for name in names]
    more = f" and {len(found) - 20:,} more" if len(found) > 20 else ""
    return (", ".join(found[:20]) + more) or "none"


def _known() -> str:
    return " · ".join(", ".join(columns) for columns in SHAPES.values())


def _mapping(ours: str, found: list[str]) -> str:
    theirs = found[0] if found else "COLUMN"
    return f"dataset='{{path: FILE, columns: {{{ours}: {theirs}, …}}}}'"
