"""The JSON schema of a config, for editors and for the documentation's table of keys.

pydantic's own schema tells what a finished config holds. What may be *written* is more: a path for
a list of datasets, one name for a list of names, ``20GB`` for a number of bytes, null for a
default; and every plain rename of a key. That is put in here, so that an editor marks a slip and
nothing else. Keys of other trainers that become nothing or several of ours are not in it.
"""

from __future__ import annotations

from typing import Any

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.fields import TrainConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"

# The first field of each group.
GROUPS = {
    "model_name_or_path": "Model and method",
    "dataset": "Data",
    "batch_size": "How long, how much at once",
    "optim": "Optimizer",
    "lora_r": "Adapter",
    "eval_dataset": "Evaluation",
    "output_dir": "Output",
    "save_minutes": "Saving",
    "devices": "Runtime",
    "machine": "Planning and the rest",
}

_STRING = {"type": "string"}
_NULL = {"type": "null"}
_TRUTH = {"type": "boolean"}
_NUMBER = {"type": "number"}
# What may be written beside what a finished config holds.
_ALSO: dict[str, list[dict[str, Any]]] = {
    "unfrozen_parameters": [_STRING],
    "modules_to_save": [_STRING],
    "target_parameters": [_STRING],
    "sample_prompts": [_STRING],
    "report_to": [_STRING],
    "resume_from_checkpoint": [_TRUTH],
    "eval_strategy": [{"const": False}],
    "save_strategy": [{"const": False}],
    "max_steps": [{"const": -1}],
    "machine": [_NUMBER],
    "device_memory_limit": [_STRING],
    "host_memory_limit": [_STRING],
    "pinned_memory_limit": [_STRING],
}


def json_schema() -> dict[str, Any]:
    """The schema, JSON values all through."""
    made = TrainConfig.model_json_schema()
    definitions = made.get("$defs", {})
    entry = {"$ref": "#/$defs/DatasetEntry"}
    if "DatasetEntry" in definitions:
        files = definitions["DatasetEntry"]["properties"]
        files["data_files"] = _also(files["data_files"], [_STRING])
    properties: dict[str, Any] = {}
    for name, about in made["properties"].items():
        also = list(_ALSO.get(name, []))
        if name in ("dataset", "eval_dataset"):
            also = [_STRING, entry, {"type": "array", "items": {"anyOf": [_STRING, entry]}}]
        properties[name] = _also(about, [*also, _NULL])
    for alias, target in keys.ALIASES.items():
        if target in made["properties"]:
            same = {key: value for key, value in properties[target].items() if key != "default"}
            properties[alias] = {**same, "description": f"another name of {target}"}
    return {
        "$schema": DRAFT,
        "title": "a config of roundpipe train",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _also(about: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of a field with further forms beside its own."""
    about = dict(about)
    kept: dict[str, Any] = {
        key: about.pop(key) for key in ("description", "default") if key in about
    }
    about.pop("title", None)
    forms = about.pop("anyOf", None) or [about]
    new = [each for each in others if each not in forms]
    return {**kept, "anyOf": [*forms, *new]}


def groups() -> dict[str, list[str]]:
    """The fields in their order, by the title of their group."""
    found: dict[str, list[str]] = {}
    title = ""
    for name in TrainConfig.model_fields:
        title = GROUPS.get(name, title)
        found.setdefault(title, []).append(name)
    return found


def aliases_of(field: str) -> list[str]:
    """Other names of a field, and keys that set it by their value."""
    plain = [alias for alias, target in keys.ALIASES.items() if target == field]
    return [*plain, *(key for key, fields in keys.DERIVED.items() if field in fields)]
