"""An adapter as peft describes it, and weights in 4 bits as transformers does, in our settings."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from roundpipe.errors import ConfigError

# Fields of LoraConfig with a setting of ours; the others go on under ``peft``.
_OURS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
# What peft notes of an adapter itself, and what only counts while one is used.
_NOTED = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "runtime_config",
    "target_modules",
)


def adapter_values(
    peft_config: Any, quantization_config: Any, *, is_adapter: bool
) -> dict[str, Any]:
    """Settings for the adapter that ``peft_config`` (a LoraConfig) describes; none without one.

    Every field of it is kept. Raises ConfigError for another kind of adapter, for one where the
    model ``is_adapter`` already, and for weights in other than 4 bits.
    """
    if is_adapter and peft_config is not None:
        raise ConfigError(
            "peft_config, and a model that has an adapter already\nhint: leave peft_config out, or "
            "model=model.merge_and_unload()"
        )
    packs = is_packing(quantization_config)
    if peft_config is None:
        return {"finetuning_type": "qlora"} if packs else {}
    kind = _text(getattr(peft_config, "peft_type", None) or type(peft_config).__name__)
    if kind != "LORA":
        raise ConfigError(f"not supported: peft_config: {kind}\nhint: peft_config=LoraConfig(…)")
    task = _text(peft_config.task_type or "CAUSAL_LM")
    if task != "CAUSAL_LM":
        raise ConfigError(
            f"not supported: peft_config: task_type={task}\nhint: task_type='CAUSAL_LM'"
        )
    values: dict[str, Any] = {"finetuning_type": "qlora" if packs else "lora"}
    rest: dict[str, Any] = {}
    for each in dataclasses.fields(peft_config):
        value = _plain(getattr(peft_config, each.name))
        if each.name in _OURS:
            values[_OURS[each.name]] = value
        elif each.name not in (*_NOTED, "task_type") and not _is_default(each, value):
            rest[each.name] = value
    targets = _plain(peft_config.target_modules)
    if targets is None and values["target_parameters"] is None:
        rest["target_modules"] = None  # peft's own choice for the architecture
    elif targets is not None:
        values["target_modules"] = targets
    values["lora_alpha"] = float(values["lora_alpha"])
    values["peft"] = rest or None
    return {key: value for key, value in values.items() if value is not None}


def is_packing(quantization_config: Any) -> bool:
    """Whether weights are to be in 4 bits as we pack them; raises ConfigError for any other way."""
    if quantization_config is None:
        return False
    given = quantization_config
    if isinstance(given, dict):
        read = given.get
    else:
        read = lambda name, default=None: getattr(given, name, default)  # noqa: E731
    if not read("load_in_4bit") and not read("load_in_8bit"):
        if type(given).__name__ in ("BitsAndBytesConfig", "dict"):
            return False
        raise ConfigError(
            f"not supported: quantization_config={type(given).__name__}(…)"
            "\nhint: quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
            "bnb_4bit_quant_type='nf4')"
        )
    if read("load_in_8bit"):
        raise ConfigError(
            "not supported: quantization_config: load_in_8bit"
            "\nhint: load_in_4bit=True, bnb_4bit_quant_type='nf4'; or none at all: weights live in "
            "host memory, so the model need not fit the device"
        )
    if (kind := read("bnb_4bit_quant_type", "nf4")) != "nf4":
        raise ConfigError(
            f"not supported: quantization_config: bnb_4bit_quant_type={kind}"
            "\nhint: bnb_4bit_quant_type='nf4'"
        )
    return True


def _plain(value: Any) -> Any:
    """A value that a config file can hold."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value


def _is_default(each: dataclasses.Field[Any], value: Any) -> bool:
    if each.default_factory is not dataclasses.MISSING:
        return bool(value == each.default_factory())
    return bool(value == each.default)


def _text(kind: Any) -> str:
    return str(kind.value if isinstance(kind, Enum) else kind)
