"""From the keys people bring to the fields of TrainConfig, with a line for whatever changed.

The file and the command line are merged before anything is derived, so
``gradient_accumulation_steps=8`` on the command line and ``per_device_train_batch_size: 2`` in the
file work together; but a field that the command line sets silences every foreign key of the file
that would set it too.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.derive import BATCH, derive, derive_batch
from roundpipe.finetune.settings.fields import TrainConfig
from roundpipe.finetune.settings.words import is_empty, text_of, translate_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIELDS = frozenset(TrainConfig.model_fields)
KNOWN = FIELDS.union(keys.ALIASES, keys.DERIVED, keys.NEEDLESS, keys.LATER, keys.REFUSED)


def translate(
    file: Mapping[str, Any], command_line: Mapping[str, Any], count_devices: Callable[[Any], int]
) -> tuple[dict[str, Any], list[str]]:
    """The values of TrainConfig's fields that two layers of keys ask for, and what to say of it.

    ``count_devices(devices)`` is asked only where a batch is given per device. Raises ConfigError
    for keys that are unknown, refused, or still to come, and for two that disagree.
    """
    notes: list[str] = []
    _refuse_unknown({**file, **command_line})
    # On the command line a short name is meant as one and needs no word.
    values = _merge(_rename(file, notes), _rename(command_line, []))
    _refuse_later(values)
    _drop_needless(values, notes)
    for key in [key for key in values if key in keys.DERIVED and key not in BATCH]:
        derive(key, values, notes)
    derive_batch(values, notes, count_devices)
    translate_words(values, notes)
    return values, notes


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    unknown = [key for key in given if key not in KNOWN]
    if not unknown:
        return
    hints = [_nearest(key) for key in unknown]
    if len(unknown) > 1:
        hints = [f"{key} → {hint}" for key, hint in zip(unknown, hints, strict=True) if hint]
    hint = ", ".join(filter(None, hints)) or "roundpipe schema lists every key"
    raise ConfigError(f"unknown key{'s' * (len(unknown) > 1)}: {', '.join(unknown)}\nhint: {hint}")


def _nearest(key: str) -> str:
    """The known key closest to ``key``, ours before foreign ones, or nothing."""
    for pool in (sorted(FIELDS), sorted(KNOWN)):
        for match in difflib.get_close_matches(key.lower(), pool, n=1, cutoff=0.75):
            return keys.ALIASES.get(match, match)
    return ""


def _rename(layer: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in layer.items():
        target = keys.ALIASES.get(key, key)
        if target in values and values[target] != value:
            raise ConfigError(
                f"{target} is given twice: {origin[target]}: {values[target]}, {key}: {value}"
                "\nhint: leave one of them out"
            )
        values[target], origin[target] = value, key
    renamed = {key: target for target, key in origin.items() if not is_empty(values[target])}
    said = [f"{key} is {target}" for key, target in renamed.items() if key != target]
    if said:
        notes.append(f"read as ours: {', '.join(said)}")
    return values


def _merge(file: dict[str, Any], command_line: dict[str, Any]) -> dict[str, Any]:
    """Both layers as one, the command line's word against any of the file's."""
    kept = dict(file)
    for key in command_line:
        targets = keys.DERIVED.get(key, (key,))
        group = BATCH if key in BATCH else set()
        for other in file:
            same_target = set(keys.DERIVED.get(other, (other,))) & set(targets)
            if same_target and other not in group:
                kept.pop(other, None)
    return {**kept, **command_line}


def _refuse_later(values: dict[str, Any]) -> None:
    for key in [key for key in values if key in keys.LATER or key in keys.REFUSED]:
        value = values.pop(key)
        if is_empty(value):
            continue
        if key in keys.REFUSED:
            raise ConfigError(f"not supported: {key}: {text_of(value)}\nhint: {keys.REFUSED[key]}")
        nothing, way_out = keys.LATER[key]
        if value != nothing:
            raise ConfigError(f"not yet: {key}: {text_of(value)}\nhint: {way_out}")


def _drop_needless(values: dict[str, Any], notes: list[str]) -> None:
    given = [key for key in values if key in keys.NEEDLESS]
    named = [key for key in given if not is_empty(values.pop(key))]
    if named:
        notes.append(f"not needed here: {', '.join(named)}")
