"""Values of the options that a command has for itself, beside the keys of a config.

Each function takes all values that were read, and gives None, or False, where the option is not
among them. Raises ConfigError with a way out for a value that means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def whole(options: Mapping[str, Any], name: str, *, least: int, such_as: int) -> int | None:
    """A whole number from ``least`` on; ``such_as`` is one that makes sense."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"no whole number from {least} on: {name}={value}\nhint: {name}={such_as}"
        )
    return value


def flag(options: Mapping[str, Any], name: str) -> bool:
    """Whether an option is true."""
    value = options.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"neither true nor false: {name}={value}\nhint: --{name}")
    return value


def is_beside_base(options: Mapping[str, Any]) -> bool:
    """Whether ``compare=base`` is said."""
    compare = options.get("compare")
    if compare not in (None, False, "base"):
        raise ConfigError(f"compare with what: compare={compare}\nhint: compare=base")
    return compare == "base"


def take_texts(
    arguments: Sequence[str], names: Mapping[str, str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Take options out of a command line whose values are texts as they stand, not YAML.

    ``names``: of each an example. Returns what is left, and the texts of each, which may be said
    again.
    """
    rest: list[str] = []
    texts: dict[str, list[str]] = {name: [] for name in names}
    words = list(arguments)
    while words:
        word = words.pop(0)
        given, equals, text = word.removeprefix("--").partition("=")
        name = given.replace("-", "_")
        if name not in names or not (equals or word.startswith("--")):
            rest.append(word)
            continue
        if not equals and not words:
            raise ConfigError(f"nothing follows {word}\nhint: {name}={names[name]}")
        texts[name].append(_as_written(name, text if equals else words.pop(0)))
    return rest, texts


def _as_written(name: str, text: str) -> str:
    """A word of the command line in its own characters, whatever the locale made of its bytes."""
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise ConfigError(
            f"not UTF-8: {name}={text[:60]!a}\nhint: `locale` says what the terminal writes"
        ) from None
