"""The JSON schema: for each form in which a key may be written, and no other."""

from __future__ import annotations

from typing import Any

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.fields import TrainConfig
from roundpipe.finetune.settings.schema import aliases_of, groups, json_schema

SCHEMA = json_schema()
TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def accepts(name: str, value: Any) -> bool:
    """Whether a property takes a value; of the draft only what the schema uses."""
    return fits(SCHEMA["properties"][name], value)


def fits(about: dict[str, Any], value: Any) -> bool:
    if "$ref" in about:
        about = SCHEMA["$defs"][about["$ref"].rpartition("/")[2]]
    if "anyOf" in about:
        return any(fits(each, value) for each in about["anyOf"])
    if "const" in about or "enum" in about:
        allowed = about.get("enum", [about.get("const")])
        return any(type(each) is type(value) and each == value for each in allowed)
    kind = about.get("type")
    if kind is not None:
        is_truth = isinstance(value, bool) and kind != "boolean"
        if is_truth or not isinstance(value, TYPES[kind]):
            return False
    if kind == "array":
        return all(fits(about.get("items", {}), each) for each in value)
    if kind == "object" and about.get("additionalProperties") is False:
        known = about["properties"]
        is_known = set(about.get("required", ())) <= set(value) <= set(known)
        return is_known and all(fits(known[key], each) for key, each in value.items())
    return True


def test_every_key_and_every_plain_rename_is_described() -> None:
    schema, properties = SCHEMA, SCHEMA["properties"]
    assert set(TrainConfig.model_fields) < set(properties)
    renames = {alias for alias, target in keys.ALIASES.items() if target in properties}
    assert set(properties) == set(TrainConfig.model_fields) | renames
    assert all(about["description"] for about in properties.values())
    assert schema["additionalProperties"] is False
    assert "required" not in schema  # the command line may have it


def test_what_may_be_written_is_accepted() -> None:
    assert accepts("dataset", "d.jsonl")
    assert accepts("dataset", {"path": "d.jsonl", "columns": {"question": "q"}})
    assert accepts("datasets", ["a.jsonl", {"path": "b.jsonl", "data_files": "x"}])
    assert accepts("host_memory_limit", "64GB")
    assert accepts("device_memory_limit", 5)
    assert accepts("resume_from_checkpoint", True)
    assert accepts("report_to", ["wandb"])
    assert accepts("report_to", "none")
    assert accepts("eval_strategy", False)  # how YAML reads a bare no
    assert accepts("lr", 1e-4)
    assert all(accepts(name, None) for name in TrainConfig.model_fields)


def test_a_slip_is_not() -> None:
    assert not accepts("dataset", {"path": "d.jsonl", "fath": 1})
    assert not accepts("finetuning_type", "loar")
    assert not accepts("packing", "yes")
    assert not accepts("lora_r", "many")
    assert not accepts("staleness", 2)


def test_every_field_has_a_group_and_other_names_are_found() -> None:
    listed = [name for fields in groups().values() for name in fields]
    assert listed == list(TrainConfig.model_fields)
    assert all(groups())
    assert aliases_of("learning_rate") == ["lr"]
    assert "sample_packing" in aliases_of("packing")
