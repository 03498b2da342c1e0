"""Configs of well-known causal LMs, so that a plan needs no network.

A file of this folder is a family: a list of models, each with its id on the hub, the number of
parameters that its makers publish (of a model that also sees, with its tower), further names
(``also``) and the part of its config that decides shapes. Names are matched by what tells models
apart: family, version and size. Owners, ways of tuning (``Instruct``), formats (``GGUF``, ``4bit``)
and dates do not count.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FOLDER = Path(__file__).parent
# Words of a name that say how a model was tuned or stored, not which it is.
_NOISE = frozenset(
    {
        *("instruct", "base", "it", "pt", "chat", "hf", "thinking", "coder", "math", "dpo", "sft"),
        *("preview", "meta", "text", "bf16", "fp16", "fp8", "gguf", "gptq", "awq", "mlx", "bnb"),
        *("4bit", "8bit", "int4", "int8", "unsloth"),
    }
)
_DATE = re.compile(r"\d{4}(\d{4})?")  # 2507, 0414, 20250120
_VERSION = re.compile(r"v0\.\d")  # Mistral-7B-v0.3


@dataclass(frozen=True)
class KnownModel:
    """``config`` is what a config.json would hold, ``model_type`` included."""

    id: str
    parameters: int  # as published
    config: Mapping[str, Any]
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The id without its owner."""
        return self.id.rpartition("/")[2]


def known_models() -> list[KnownModel]:
    """All of them, family by family, small ones first. Reads a dozen small files."""
    return [
        KnownModel(entry["id"], entry["parameters"], entry["config"], tuple(entry["also"]))
        for file in sorted(_FOLDER.glob("*.json"))
        for entry in json.loads(file.read_text(encoding="utf-8"))
    ]


def find_known(given: str) -> KnownModel | None:
    """The model that ``given`` names, e.g. ``Qwen/Qwen3-32B`` or ``qwen3-32b``; None if unknown."""
    exact = {name.lower(): model for model in known_models() for name in _names(model)}
    found = exact.get(given.lower()) or exact.get(given.lower().rpartition("/")[2])
    if found is not None:
        return found
    words = _words(given)
    return next((model for name, model in exact.items() if _words(name) == words), None)


def nearest_known(given: str, count: int = 3) -> list[str]:
    """Ids of models whose names look most like ``given``."""
    by_name = {name.lower(): model.id for model in known_models() for name in _names(model)}
    wanted = given.lower().rpartition("/")[2]
    close = difflib.get_close_matches(wanted, by_name, n=3 * count, cutoff=0.5)
    return list(dict.fromkeys(by_name[name] for name in close))[:count]


def _names(model: KnownModel) -> Iterator[str]:
    yield model.id
    yield model.name
    yield from model.also


def _words(name: str) -> tuple[str, ...]:
    name = name.lower().rpartition("/")[2].partition("@")[0]
    words = [word for word in re.split(r"[-_ :]+", name) if word]
    kept = [
        word
        for word in words
        if word not in _NOISE and not _DATE.fullmatch(word) and not _VERSION.fullmatch(word)
    ]
    return tuple(re.sub(r"(?<=[a-z])(?=\d)", "-", "-".join(kept)).split("-"))
