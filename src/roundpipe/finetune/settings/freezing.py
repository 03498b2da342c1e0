"""Layers that stay trainable, from the numbers and names in which LLaMA-Factory gives them.

``layers:-2`` among ``unfrozen_parameters`` means the last two layers, ``layers:2`` the first two;
a third part (``layers:-2:mlp``) is a regular expression that their parameters must match too.
"""

from __future__ import annotations

import re
from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import is_empty, text_of

DEFAULT_LAYERS = 2  # of LLaMA-Factory's freeze, where nothing is said


def unfrozen_layers(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any] | str:
    """`freeze_trainable_layers` and `freeze_trainable_modules`, which belong together."""
    if values.get("finetuning_type") != "freeze":
        return "not needed: finetuning_type says that not a part of the weights is trained"
    number = value if key == "freeze_trainable_layers" else DEFAULT_LAYERS
    modules = value if key == "freeze_trainable_modules" else None
    modules = values.pop("freeze_trainable_modules", modules)
    others = values.pop("unfrozen_parameters", None) or []
    return {"unfrozen_parameters": [_layers(number, _names(modules)), *_listed(others)]}


def unfrozen_others(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any] | str:
    """`freeze_extra_modules`: modules beside the layers."""
    if values.get("finetuning_type") != "freeze":
        return "not needed: finetuning_type says that not a part of the weights is trained"
    known = _listed(values.pop("unfrozen_parameters", None) or [])
    if not known:
        known = [_layers(DEFAULT_LAYERS, [])]
    extra = [rf"(^|\.){re.escape(name)}(\.|$)" for name in _names(value)]
    return {"unfrozen_parameters": [*known, *extra]}


def _layers(number: Any, modules: list[str]) -> str:
    if isinstance(number, bool) or not isinstance(number, int) or number == 0:
        raise ConfigError(
            f"not a number of layers: freeze_trainable_layers: {text_of(number)}"
            "\nhint: freeze_trainable_layers=2, the last two; -2, the first two"
        )
    parts = ["layers", str(-number)]
    if modules and modules != ["all"]:
        parts.append("|".join(re.escape(name) for name in modules))
    return ":".join(parts)


def _names(value: Any) -> list[str]:
    if is_empty(value):
        return []
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
