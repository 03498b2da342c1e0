"""From what a user names to a config of transformers: a folder, a config.json, a well-known model.

A config may come from anywhere. None of its code is run, nothing is fetched, and numbers that would
take this machine's memory or hours are refused before a module is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.models.known import find_known, nearest_known

if TYPE_CHECKING:
    from roundpipe.models.known import KnownModel

_LARGEST_FILE = 4 << 20
_LARGEST_NUMBER = 1 << 24  # of any width, vocabulary or count of experts
_MOST_MODULES = 4096  # layers, experts
_LONGEST_LIST = 10_000
# Numbers that allocate nothing: positions, bases of rotary tables, ids, sizes of experts.
_HARMLESS = (
    *("theta", "base", "max_position", "length", "limit", "_id", "eps", "intermediate_size"),
    *("clipping", "logits_value"),  # of what hears
)
# What describes files or this machine rather than the model, or names code to be fetched.
_DROPPED = (
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "dtype",
    "experts_implementation",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


def find_config(given: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What ``given`` names: a short name, and the fields of its config.

    ``given``: a model folder, a config.json, the id or name of a well-known model, or the fields
    themselves. Raises ConfigError, with the nearest names, for anything else.
    """
    if isinstance(given, Mapping):
        return str(given.get("model_type", "model")), dict(given)
    path = Path(given).expanduser()
    if path.is_dir():
        return path.resolve().name, _read(path / "config.json")
    if path.is_file():
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return name, _read(path)
    known = named(str(given))
    if known is not None:
        return known.name, dict(known.config)
    near = nearest_known(str(given))
    raise ConfigError(
        f"no config at hand for this model: {given}\n"
        f"hint: give a folder or a config.json{', or one of: ' if near else ''}{', '.join(near)}"
    )


def named(given: str) -> KnownModel | None:
    """The well-known model that ``given`` names, unless it is a path or may be meant as one."""
    if given.startswith((".", "/", "~")) or given.count("/") > 1 or Path(given).exists():
        return None
    return find_known(given)


def make_config(fields: Mapping[str, Any]) -> Any:
    """A config of transformers from its fields; raises ConfigError for what cannot be one."""
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 (imports late)

    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_type: not one that the installed transformers knows: {kind!r}\n"
            "hint: files that bring code of their own are never run; update transformers"
        )
    clean = _without_code(fields)
    _check_numbers(clean)
    del clean["model_type"]
    try:
        return AutoConfig.for_model(kind, **clean)
    except Exception as error:  # whatever a validator of one of 400 classes raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"not a config of a {kind} model: {first}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no config.json in: {path.parent}\nhint: name a model folder")
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigError(f"too large for a config: {path}: {path.stat().st_size} bytes")
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"not a config: {path} holds no object")
    return fields


def _without_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if isinstance(key, str) and key not in _DROPPED and not key.startswith("_")
    }


def _check_numbers(fields: Mapping[str, Any], where: str = "") -> None:
    for key, value in fields.items():
        name = where + key
        if isinstance(value, Mapping):
            _check_numbers(value, f"{name}.")
        elif isinstance(value, list) and len(value) > _LONGEST_LIST:
            raise ConfigError(f"{name}: too long a list: {len(value)}")
        elif isinstance(value, (int, float)) and not abs(value) <= _most(key):
            raise ConfigError(f"{name}: no model has that many: {value}")


def _most(key: str) -> float:
    """The largest number that ``key`` may have; what makes modules, one for each, is bounded."""
    if any(part in key for part in _HARMLESS):
        return float("inf")
    if "layer" in key or "expert" in key:
        return _MOST_MODULES
    return _LARGEST_NUMBER
