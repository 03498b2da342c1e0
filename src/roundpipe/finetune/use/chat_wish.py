"""What `roundpipe chat` was asked for, beside RUN and the keys of a config. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.parse import parse_value
from roundpipe.finetune.use.options import flag, is_beside_base, whole

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
TEXTS = {"prompt": "'what is 12 + 7?'", "system": "'answer in one word'"}  # see `take_texts`
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


def chat_wish(
    options: Mapping[str, Any], texts: Mapping[str, Sequence[str]], *, seed: int | None
) -> ChatWish:
    """The wish that these values make. Raises ConfigError for one that means nothing."""
    counts = {name: whole(options, name, least=least, such_as=50) for name, least in _WHOLE.items()}
    numbers: dict[str, Any] = {name: each for name, each in counts.items() if each is not None}
    numbers |= {name: _number(name, options[name], *of) for name, of in _given(_NUMBERS, options)}
    names = ("top_p", "top_k", "repetition_penalty")
    prompts = [text for given in texts.get("prompt", ()) for text in _prompts(given)]
    return ChatWish(
        sampling={name: numbers.pop(name) for name in names if name in numbers},
        seed=seed,
        system="\n".join(texts.get("system", ())) or None,
        prompts=tuple(prompts),
        as_json=flag(options, "json"),
        compares=is_beside_base(options),
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


def _number(name: str, value: Any, least: float, most: float | None) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_open = name != "temperature"  # where 0 means nothing
    if not is_number or not math.isfinite(value) or value < least or (is_open and value == least):
        what = "above 0" if is_open else "from 0 on"
        raise ConfigError(f"not a number {what}: {name}={value}\nhint: {name}=0.9")
    if most is not None and value > most:
        raise ConfigError(f"more than {most:g}: {name}={value}\nhint: {name}=0.9")
    return float(value)
