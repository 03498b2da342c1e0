"""How often, in the words of other trainers: so many times an epoch, a share of all steps."""

from __future__ import annotations

from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import NOTHING, text_of

_EPOCHS = 3.0  # our default, where nothing is said


def evals_per_epoch(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any] | str:
    """So many evaluations an epoch, as a share of all steps."""
    if not has_evaluation(values):
        return "not used: there is no data to evaluate on"
    return _share(key, value, values, "eval")


def saves_per_epoch(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any] | str:
    """So many checkpoints an epoch, as a share of all steps."""
    return _share(key, value, values, "save")


def warmup_ratio(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any] | str:
    """A share of all steps, unless a number of steps says it."""
    if _number(key, value) >= 1:
        raise ConfigError(
            f"not a share below 1: {key}: {text_of(value)}\nhint: warmup_steps=N for N steps"
        )
    number = values.get("warmup_steps")
    if not number or number == value:
        values.pop("warmup_steps", None)
        return {"warmup_steps": value}
    if not _number(key, value):
        return NOTHING
    raise ConfigError(
        f"warmup_steps is given twice: warmup_steps: {text_of(number)}, {key}: {text_of(value)}"
        "\nhint: leave one of them out"
    )


def has_evaluation(values: dict[str, Any]) -> bool:
    """Whether there is to be data to evaluate on."""
    size = values.get("val_size")
    return bool(values.get("eval_dataset")) or (size is not None and str(size) not in ("0", "0.0"))


def _share(key: str, value: Any, values: dict[str, Any], what: str) -> dict[str, Any] | str:
    count = _number(key, value)
    if not count:
        return NOTHING
    epochs, is_cut = values.get("num_train_epochs"), values.get("max_steps") not in (None, -1, 0)
    if values.get(f"{what}_strategy") == "steps":
        del values[f"{what}_strategy"]  # which says no more than that
    times = count * (_EPOCHS if epochs is None else _number("num_train_epochs", epochs))
    # Where max_steps ends a run, the share is of these, as it is there.
    if times <= 1 or (count == 1 and not is_cut):
        return {f"{what}_strategy": "epoch"}
    return {f"{what}_steps": 1 / times}


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if number < 0 or isinstance(value, bool):
        raise ConfigError(f"not a number: {key}: {text_of(value)}\nhint: {key}=1")
    return number
