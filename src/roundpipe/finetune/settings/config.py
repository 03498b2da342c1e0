"""Where a TrainConfig comes from and goes to: a command line, a mapping, a saved ``config.yaml``.

Whatever is wrong with a setting is a ConfigError here, one paragraph with a way out. Nothing of
this imports torch, unless a batch is given per device and the devices are to be counted.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig
from roundpipe.finetune.settings.meant import say_defaults
from roundpipe.finetune.settings.parse import parse_argv, read_file
from roundpipe.finetune.settings.translate import KNOWN, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from roundpipe.finetune.settings.account import Became

__all__ = [
    "DatasetEntry",
    "Reading",
    "TrainConfig",
    "count_devices",
    "dump_config",
    "load_config",
    "make_config",
    "read_layers",
]

# What a saved config leaves out: they say how a run starts, not what it is.
_OF_A_START = ("overwrite_output_dir", "resume_from_checkpoint")

_REQUIRED = {
    "model_name_or_path": "model=FOLDER, a hub id or a GGUF file",
    "dataset": "dataset=FILE.jsonl",
}
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_NAMED = re.compile(r"(?:cpu|cuda:\d+|\d+)(?:\*(\d+))?")
_LORA_ONLY = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "use_dora",
    "use_rslora",
    "peft",
)


@dataclass(frozen=True)
class Reading:
    """A config, a line for each thing to be said of it, and what each key became.

    ``beyond``: those lines that say more than the keys do.
    """

    config: TrainConfig
    notes: list[str]
    beyond: list[str]
    keys: list[Became]


def load_config(
    argv: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> tuple[TrainConfig, list[str]]:
    """Read ``[FILE] [key=value | --key value | --key=value …]``.

    Returns the config and a line for each key that became another or is not needed. ``environment``
    is the process's, for counting devices. Raises ConfigError.
    """
    file, command_line = parse_argv(argv, known=KNOWN)
    in_file = read_file(file, environment) if file is not None else {}
    return _make(in_file, command_line, environment)


def read_layers(
    file: Mapping[str, Any], command_line: Mapping[str, Any], count_devices: Callable[[Any], int]
) -> Reading:
    """Read two layers of keys, the command line's over a file's.

    ``count_devices(devices)`` is asked where a batch is given per device. Raises ConfigError.
    """
    values, account = translate(file, command_line, count_devices)
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as problem:
        raise ConfigError(_paragraph(problem)) from None
    if config.finetuning_type in ("full", "freeze"):
        plain = TrainConfig.model_validate(
            {"model_name_or_path": "-", "dataset": "-", "finetuning_type": "full"}
        )
        unused = [
            field
            for field in _LORA_ONLY
            if field in values and getattr(config, field) != getattr(plain, field)
        ]
        if unused:
            method = f"finetuning_type={config.finetuning_type}"
            account.say(f"not used with {method}: {', '.join(unused)}")
            for field in unused:
                account.leaves(field, f"not used with {method}")
    say_defaults(file, config, account)
    return Reading(config, account.notes, account.beyond, account.rows(_values(config)))


def make_config(
    given: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
) -> tuple[TrainConfig, list[str]]:
    """Like `load_config`, from keys and values that are there already."""
    return _make({}, given, environment)


def dump_config(config: TrainConfig) -> str:
    """The config as YAML that `load_config` reads back to an equal one.

    What only says how a run starts (going on, replacing what is there) is left out.
    """
    values = _values(config)
    for field in _OF_A_START:
        del values[field]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    if _LINE_BREAKS.search(text):  # YAML reads them as such wherever they stand
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=100)
    return text


def _values(config: TrainConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    for field in ("dataset", "eval_dataset"):
        values[field] = _short(values[field])
    return values


def _short(entries: list[dict[str, Any]] | None) -> Any:
    """A file that needs no more than its path is written as a path."""
    if entries is None:
        return None
    plain = {name: info.default for name, info in DatasetEntry.model_fields.items()}
    filled = [{k: v for k, v in entry.items() if v != plain[k]} for entry in entries]
    short = [entry["path"] if set(entry) == {"path"} else entry for entry in filled]
    return short[0] if len(short) == 1 else short


def _make(
    file: Mapping[str, Any],
    command_line: Mapping[str, Any],
    environment: Mapping[str, str] | None,
) -> tuple[TrainConfig, list[str]]:
    def count(devices: Any) -> int:
        return count_devices(devices, environment)

    reading = read_layers(file, command_line, count)
    return reading.config, reading.notes


def count_devices(devices: Any, environment: Mapping[str, str] | None) -> int:
    """How many devices a setting names; asks torch only where it names none by itself."""
    if isinstance(devices, int):
        return devices
    names = devices if isinstance(devices, list | tuple) else str(devices).split(",")
    counted = [_NAMED.fullmatch(str(name).strip()) for name in names]
    if all(counted):
        return sum(int(found[1] or 1) for found in counted if found)
    from roundpipe.device.resolve import resolve_devices  # noqa: PLC0415, torch takes seconds

    found = resolve_devices(devices, environment=environment)
    for device in found:
        device.close()
    return len(found)


def _paragraph(problem: ValidationError) -> str:
    """The first of pydantic's findings, as one of our messages."""
    found = problem.errors(include_url=False)[0]
    field = str(found["loc"][0]) if found["loc"] else ""
    place = ".".join(str(part) for part in found["loc"] if not _is_variant(part))
    if found["type"] == "missing" and field in _REQUIRED:
        return f"no {field} is given\nhint: {_REQUIRED[field]}"
    if found["type"] == "value_error":
        text = str(found["ctx"]["error"]) if "ctx" in found else found["msg"]
        return f"{place}: {text}" if place else text
    if found["type"] == "extra_forbidden":
        names = list(DatasetEntry.model_fields)
        near = difflib.get_close_matches(str(found["loc"][-1]), names, n=1)
        return f"unknown key: {place}\nhint: {', '.join(near or names)}"
    message = re.sub(r"^Input should be ", "", found["msg"])
    message = message[:1].lower() + message[1:].partition(", unable to parse")[0]
    return f"{place}: {_value(found['input'])} is not {message}\nhint: {_way_out(field, found)}"


def _is_variant(part: object) -> bool:
    """Whether a piece of a location only names the alternative of a union that was tried."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float"))


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _way_out(field: str, found: ErrorDetails) -> str:
    info = TrainConfig.model_fields.get(field)
    if found["type"] == "literal_error":
        choices = re.findall(r"'[^']*'|\d+", found["ctx"]["expected"])
        choices = [choice.strip("'") for choice in choices]
        names = [part for part in found["loc"] if isinstance(part, str) and not _is_variant(part)]
        cutoff = 0.6 if len(names) == 1 else 0.85
        near = difflib.get_close_matches(str(found["input"]), choices, n=1, cutoff=cutoff)
        if names[1:] == ["type"] and not near:
            return "leave type out: the columns tell the shape, or columns: {OURS: THEIRS}"
        if len(names) > 1:
            return f"{names[-1]}: {near[0] if near else choices[0]}"
        return f"{field}={near[0] if near else choices[0]}" if choices else "see roundpipe schema"
    return f"{field}: {info.description}" if info else "see roundpipe schema"
