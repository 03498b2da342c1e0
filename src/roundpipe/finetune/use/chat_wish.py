"""What `roundpipe chat` was asked for, beside RUN and the keys of a config. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.parse import parse_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "batch_size",
    "compare",
    "json",
)
_TEXTS = ("prompt", "system")  # taken as they are written, whatever YAML would make of them
_WHOLE = {"max_new_tokens": 1, "top_k": 0, "batch_size": 1}
_NUMBERS = {"temperature": (0.0, None), "top_p": (0.0, 1.0), "repetition_penalty": (0.0, None)}


@dataclass(frozen=True, kw_only=True)
class ChatWish:
    """``temperature``: 0 is greedy, None: as the model's own settings say; ``sampling``: the other
    options that its ``generate`` takes; ``seed``: None draws anew each time. ``prompts``: to answer
    at once, in place of a conversation.
    """

    max_new_tokens: int = 512
    batch_size: int = 8
    temperature: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    system: str | None = None
    prompts: tuple[str, ...] = ()
    as_json: bool = False
    compares: bool = False


def split_texts(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Take ``prompt=…`` and ``system=…``, which may be said again, out of a command line."""
    rest: list[str] = []
    texts: dict[str, list[str]] = {name: [] for name in _TEXTS}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if name not in _TEXTS or not (equals or word.startswith("--")):
            rest.append(word)
            continue
        if not equals and not words:
            raise ConfigError(f"nothing follows {word}\nhint: {name}='what is 12 + 7?'")
        texts[name].append(text if equals else words.pop(0))
    return rest, texts


def chat_wish(
    options: Mapping[str, Any], texts: Mapping[str, Sequence[str]], *, seed: int | None
) -> ChatWish:
    """The wish that these values make. Raises ConfigError for one that means nothing."""
    numbers: dict[str, Any] = {
        name: _whole(name, options[name], least) for name, least in _given(_WHOLE, options)
    }
    numbers |= {name: _number(name, options[name], *of) for name, of in _given(_NUMBERS, options)}
    names = ("top_p", "top_k", "repetition_penalty")
    compare = options.get("compare")
    if compare not in (None, False, "base"):
        raise ConfigError(f"compare with what: compare={compare}\nhint: compare=base")
    as_json = options.get("json") or False
    if not isinstance(as_json, bool):
        raise ConfigError(f"neither true nor false: json={as_json}\nhint: --json")
    prompts = [text for given in texts.get("prompt", ()) for text in _prompts(given)]
    return ChatWish(
        sampling={name: numbers.pop(name) for name in names if name in numbers},
        seed=seed,
        system="\n".join(texts.get("system", ())) or None,
        prompts=tuple(prompts),
        as_json=as_json,
        compares=compare == "base",
        **numbers,
    )


def _given(known: Mapping[str, Any], options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, of) for name, of in known.items() if options.get(name) is not None]


def _prompts(given: str) -> list[str]:
    """One prompt as it stands, or those of a YAML list."""
    if not (given.startswith("[") and given.endswith("]")):
        return [given]
    try:
        found = parse_value(given)
    except ConfigError:
        return [given]
    return [str(each) for each in found] if isinstance(found, list) else [given]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"no whole number from {least} on: {name}={value}\nhint: {name}=50")
    return value


def _number(name: str, value: Any, least: float, most: float | None) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_open = name != "temperature"  # where 0 means nothing
    if not is_number or value < least or (is_open and value == least):
        what = "above 0" if is_open else "from 0 on"
        raise ConfigError(f"not a number {what}: {name}={value}\nhint: {name}=0.9")
    if most is not None and value > most:
        raise ConfigError(f"more than {most:g}: {name}={value}\nhint: {name}=0.9")
    return float(value)
