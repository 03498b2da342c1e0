"""Which parameters are trained where all others are frozen, by what the user wrote.

Two forms: a regular expression, found anywhere in a parameter's name in transformers, and
``layers:N`` for the first N blocks of the model, ``layers:-N`` for the last; a third part, as in
``layers:-2:mlp``, is a regular expression for the names within these blocks.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.find_blocks import find_blocks
from roundpipe.models.text_only import other_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

_LAYERS = re.compile(r"layers:(-?\d+)(?::(.+))?")


def unfrozen(model: nn.Module, patterns: Sequence[str]) -> dict[str, Tensor]:
    """The parameters that ``patterns`` name, by the names that were found.

    A tied weight has several names, and any of them will do. Towers that no text reaches are not
    meant. Raises ConfigError for a pattern that names nothing, or is none.
    """
    towers = tuple(f"{part}." for part in other_parts(model))
    named = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point() and not name.startswith(towers)
    }
    found: dict[str, Tensor] = {}
    for pattern in patterns:
        chosen = _chosen(model, pattern, named)
        if not chosen:
            raise ConfigError(
                f"unfrozen_parameters: no weight is called like {pattern}\n"
                f"hint: names look like {_near(pattern, list(named))}"
            )
        found.update((name, named[name]) for name in chosen)
    return found


def _chosen(model: nn.Module, pattern: str, named: Mapping[str, Tensor]) -> list[str]:
    layers = _LAYERS.fullmatch(pattern)
    if layers is None:
        expression = _compiled(pattern, pattern)
        return [name for name in named if expression.search(name)]
    expression = _compiled(layers[2] or "", pattern)
    starts = _starts(model, int(layers[1]), pattern)
    return [
        name
        for name in named
        for start in starts
        if name.startswith(start) and expression.search(name[len(start) :])
    ]


def _starts(model: nn.Module, count: int, pattern: str) -> list[str]:
    """What the names of the parameters of the first or last blocks begin with."""
    try:
        list_name, blocks = find_blocks(model)
    except ModelError as error:
        raise ConfigError(
            f"unfrozen_parameters: {pattern}: {str(error).partition(chr(10))[0]}\n"
            "hint: name its weights by a regular expression"
        ) from error
    if not 0 < abs(count) <= len(blocks):
        raise ConfigError(
            f"unfrozen_parameters: {pattern}: the model has {len(blocks)} blocks\n"
            f"hint: unfrozen_parameters=layers:-{min(2, len(blocks))}"
        )
    chosen = range(len(blocks))[:count] if count > 0 else range(len(blocks))[count:]
    return [f"{list_name}.{index}." for index in chosen]


def _compiled(expression: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"unfrozen_parameters: not a regular expression: {pattern}: {error}\n"
            r"hint: unfrozen_parameters=['\.mlp\.'], or layers:-2 for the last two blocks"
        ) from error


def _near(pattern: str, names: list[str]) -> str:
    """A name with a part like one in ``pattern``."""
    first = {part: name for name in reversed(names) for part in name.split(".")}
    near = (difflib.get_close_matches(w, first, n=1) for w in re.findall(r"[A-Za-z]\w+", pattern))
    return " or ".join(dict.fromkeys(first[found[0]] for found in near if found)) or names[0]
