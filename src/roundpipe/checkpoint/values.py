"""Any state made of plain values and tensors, as JSON and a set of tensors: no pickle, ever.

A tensor is kept under a name that says where it stood, ``{"$tensor": name}`` takes its place. What
JSON does not have is told by such a key too: tuples, numbers that are not finite, mappings whose
keys are no strings. Nothing but these kinds is ever made of a file.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.shards import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DEEPEST = 60
_DTYPES = frozenset(DTYPES.values())


def encode(value: Any, tensors: dict[str, torch.Tensor], at: str) -> Any:
    """What JSON gets of ``value``, which stands ``at`` (in words); adds to ``tensors`` by name.

    Numbers come back with the same bits. Tensors are not copied; they come back on the host. Raises
    ConfigError for anything that is not made of plain values, sequences, mappings and tensors.
    """
    if len(at.split(".")) > _DEEPEST:
        raise ConfigError(f"state that is nested too deep to be saved: {at[:100]}")
    if value is None or isinstance(value, (bool, str)):
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors, at)
    if isinstance(value, (list, tuple)):
        items = [encode(each, tensors, f"{at}.{i}") for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _mapping(value, tensors, at)
    raise ConfigError(
        f"state that cannot be saved without pickle: {at}: {type(value).__name__}\n"
        "hint: give numbers, strings, lists, dicts and tensors"
    )


def _tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], at: str) -> dict[str, str]:
    if value.dtype not in _DTYPES or value.layout is not torch.strided or value.is_meta:
        kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
        raise ConfigError(f"a tensor that a safetensors file cannot hold: {at}: {kind}")
    name = at
    while name in tensors:
        name += "'"
    tensors[name] = value.detach()
    return {"$tensor": name}


def _mapping(value: dict[Any, Any], tensors: dict[str, torch.Tensor], at: str) -> dict[str, Any]:
    if type(value) is not Counter and all(type(k) is str and k[:1] != "$" for k in value):
        return {key: encode(each, tensors, f"{at}.{key}") for key, each in value.items()}
    in_keys: dict[str, torch.Tensor] = {}
    pairs = [
        [encode(key, in_keys, f"{at}'s keys"), encode(each, tensors, f"{at}.{key}")]
        for key, each in value.items()
    ]
    if in_keys:
        raise ConfigError(f"a tensor as a key, which cannot be saved: {at}")
    return {"$counter" if type(value) is Counter else "$items": pairs}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse of `encode`; raises ValueError or KeyError for what it would not have made."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if any(key[:1] == "$" for key in value):
        ((kind, inside),) = value.items()
        return _SPECIAL[kind](inside, tensors)
    return {key: decode(each, tensors) for key, each in value.items()}


def _pairs(inside: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, {}): decode(each, tensors) for key, each in inside}


_SPECIAL: Mapping[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$tensor": lambda inside, tensors: tensors[inside],
    "$float": lambda inside, _: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[inside],
    "$tuple": lambda inside, tensors: tuple(decode(inside, tensors)),
    "$items": _pairs,
    "$counter": lambda inside, tensors: Counter(_pairs(inside, tensors)),
}
