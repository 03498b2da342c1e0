"""Loggers by name: those that we write to, and those that a config of another trainer names."""

from __future__ import annotations

import importlib.util
from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import is_empty

LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
_OTHERS = (
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "neptune",
    "swanlab",
)


def reporters(given: Any) -> list[str]:
    """The loggers that a value of ``report_to`` names; ``all``: those that are installed.

    Raises ConfigError for one that is not written to.
    """
    if is_empty(given) or given is True:
        return []
    if isinstance(given, str):
        given = given.replace(",", " ").split()
    names = [str(name) for name in (given if isinstance(given, list | tuple) else [given])]
    found: list[str] = []
    for name in names:
        if name in _OTHERS:
            raise ConfigError(
                f"not supported: report_to: {name}\nhint: report_to=none, or {', '.join(LOGGERS)}"
            )
        found += installed_loggers() if name == "all" else [name] if not is_empty(name) else []
    return list(dict.fromkeys(found))


def installed_loggers() -> list[str]:
    """Those of the four loggers whose package is here."""
    return [name for name in LOGGERS if importlib.util.find_spec(name) is not None]
