"""Messages, in the spellings that datasets use, as chat templates take them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = dict[str, Any]


_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them; ``trained[i]`` is false where an answer is not learned.

    ``plain`` is (prompt, completion) where the row was two strings.
    """

    messages: list[Message]
    trained: list[bool]
    tools: list[Any] | None = None
    plain: tuple[str, str] | None = None


def conversation_of(value: Any, *, tools: list[Any] | None = None) -> Conversation:
    """Messages of a dataset as chat templates take them. Raises DataError naming the message."""
    if not isinstance(value, list) or not value:
        raise DataError(f"not a list of messages: {str(value)[:60]}\nhint: on_bad_line=skip")
    messages = [_message(item, number) for number, item in enumerate(value, 1)]
    trained = [_is_wanted(item) for item in value]
    return Conversation(messages, trained, tools=tools)


def _is_wanted(item: Mapping[str, Any]) -> bool:
    """Two spellings of "do not learn this answer" that datasets carry in a message."""
    return item.get("weight", 1) != 0 and item.get("train", True) is not False


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"message {number} is not an object: {str(item)[:60]}\nhint: {_WANT}")
    raw = item.get("role", item.get("from"))
    role = _ROLES.get(raw) if isinstance(raw, str) else None
    if role is None:
        raise DataError(
            f"message {number} has an unknown role: {str(raw)[:40]}"
            f"\nhint: one of {', '.join(_ROLES)}"
        )
    content = _content(item.get("content", item.get("value")), number)
    if raw == "function_call":
        return {"role": role, "content": "", "tool_calls": _calls(content, number)}
    rest = {k: v for k, v in item.items() if k not in _READ and v is not None}
    if not rest.get("tool_calls", True):
        del rest["tool_calls"]  # none: a template may ask whether the field is there
    if "tool_calls" in rest:
        if not isinstance(rest["tool_calls"], list):
            raise DataError(f"message {number} has tool_calls that are no list\nhint: {_WANT}")
        rest["tool_calls"] = [_decoded(call) for call in rest["tool_calls"]]
    elif content is None:
        raise DataError(f"message {number} has no content\nhint: {_WANT}")
    return {"role": role, "content": content or "", **rest}


_WANT = '{"role": "user", "content": "…"}'
_READ = ("role", "from", "content", "value", "weight", "train")


def _content(value: Any, number: int) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part if isinstance(part, dict) else {} for part in value]
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
        kinds = sorted({str(part.get("type")) for part in parts} - {"text"})
        raise DataError(
            f"message {number} has parts that are no text: {', '.join(kinds)}"
            "\nhint: only text is trained"
        )
    raise DataError(
        f"message {number} has content that is no string: {str(value)[:60]}\nhint: {_WANT}"
    )


def _calls(text: str | None, number: int) -> list[dict[str, Any]]:
    """ShareGPT's function calls, a string of JSON of one or of several, as templates take them."""
    try:
        found = json.loads(text or "")
        return [
            {
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in (found if isinstance(found, list) else [found])
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DataError(
            f"message {number} is not a function call: {(text or '')[:60]}"
            '\nhint: {"name": …, "arguments": {…}}'
        ) from problem


def _decoded(call: Any) -> Any:
    """A call whose arguments are a string of JSON, as some interfaces write it, decoded."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools column, which may be a string of JSON. Raises DataError."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as problem:
            raise DataError(f"tools is not JSON: {tools[:60]}\nhint: a list of tools") from problem
    if tools and not isinstance(tools, list):
        raise DataError(f"tools is not a list: {str(tools)[:60]}\nhint: a list of tools")
    return tools or None
