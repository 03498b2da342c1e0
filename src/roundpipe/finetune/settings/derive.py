"""Foreign keys whose meaning hangs on their value, a rule each; the batch, which takes three."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.words import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size"}
_TIMES = "\N{MULTIPLICATION SIGN}"


def derive(key: str, values: dict[str, Any], notes: list[str]) -> None:
    """Replace a foreign key by the field it means."""
    value = values.pop(key)
    if value is None or (value == "" and key != "adapter"):
        return
    fields = _RULES[key](key, value, values)
    for field, new in fields.items():
        if field in values and values[field] != new:
            raise ConfigError(
                f"{key}: {text_of(value)} and {field}: {text_of(values[field])} disagree"
                "\nhint: leave one of them out"
            )
        values[field] = new
        notes.append(f"{key}: {text_of(value)} is {field}: {text_of(new)}")
    if key == "template":
        notes.append(f"not used: template: {value} (the model's own; see the marked sample)")


def _adapter(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    value = "full" if value == "" or value is False else value
    return {} if _is_lora_of_4_bits(value, values) else {"finetuning_type": value}


def _use_peft(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    value = "lora" if value else "full"
    return {} if _is_lora_of_4_bits(value, values) else {"finetuning_type": value}


def _is_lora_of_4_bits(method: str, values: Mapping[str, Any]) -> bool:
    """Whether another key has said already that the weights below an adapter are in 4 bits."""
    return method == "lora" and values.get("finetuning_type") == "qlora"


def _quantized(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    if not value:
        return {}
    if key == "load_in_8bit" or (key == "quantization_bit" and value != 4):
        raise ConfigError(
            f"not supported: {key}: {text_of(value)} (base weights in other than 4 or 16 bits)"
            "\nhint: finetuning_type=qlora, or leave it out: weights live in host memory, so the "
            "model need not fit the device"
        )
    method = values.get("finetuning_type")
    if method not in (None, "lora", "qlora"):
        raise ConfigError(
            f"4-bit weights cannot be trained: {key}: {text_of(value)} with finetuning_type: "
            f"{method}\nhint: finetuning_type=qlora"
        )
    values.pop("finetuning_type", None)
    return {"finetuning_type": "qlora"}


def _revision(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    model = values.pop("model_name_or_path", "")
    return {"model_name_or_path": f"{str(model).partition('@')[0]}@{value}"}


def _precision(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": key} if value is True else {}


def _attention(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"attn_implementation": "sdpa"} if value else {}


def _all_linear(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"target_modules": "all-linear"} if value else {}


def _inverted(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"train_on_prompt": True} if value is False else {}


def _scheduler_arguments(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    rest = dict(value) if isinstance(value, dict) else {"": value}
    fields = {}
    for name in ("min_lr_rate", "min_lr_ratio"):
        if name in rest:
            fields["min_lr_ratio"] = rest.pop(name)
    if rest:
        raise ConfigError(f"not yet: {key}: {text_of(value)}\nhint: min_lr_ratio=0.1")
    return fields


def _supervised_only(key: str, value: Any, values: dict[str, Any]) -> dict[str, Any]:
    if value in ("sft", False):
        return {}
    raise ConfigError(f"not yet: {key}: {text_of(value)}\nhint: only supervised fine-tuning (sft)")


_RULES: dict[str, Callable[[str, Any, dict[str, Any]], dict[str, Any]]] = {
    "adapter": _adapter,
    "use_peft": _use_peft,
    "load_in_4bit": _quantized,
    "load_in_8bit": _quantized,
    "quantization_bit": _quantized,
    "model_revision": _revision,
    "bf16": _precision,
    "fp16": _precision,
    "flash_attention": _attention,
    "flash_attn": _attention,
    "sdp_attention": _attention,
    "lora_target_linear": _all_linear,
    "assistant_only_loss": _inverted,
    "completion_only_loss": _inverted,
    "lr_scheduler_kwargs": _scheduler_arguments,
    "stage": _supervised_only,
    "rl": _supervised_only,
    "template": lambda key, value, values: {},
}


def derive_batch(
    values: dict[str, Any], notes: list[str], count_devices: Callable[[Any], int]
) -> None:
    """Put samples per optimizer step for samples per device, accumulation and devices."""
    accumulation = values.pop("gradient_accumulation_steps", None)
    per_device = values.pop("per_device_train_batch_size", None)
    if per_device is None and accumulation is not None and "batch_size" not in values:
        per_device = values.pop("micro_batch_size", None)  # what axolotl calls the same number
    if per_device is None and accumulation is None:
        return
    if values.get("batch_size") is not None:
        raise ConfigError(
            f"batch_size: {values['batch_size']} stands beside "
            f"{'per_device_train_batch_size' if per_device else 'gradient_accumulation_steps'}"
            "\nhint: batch_size alone says how many samples an optimizer step takes"
        )
    numbers = [1 if number is None else number for number in (per_device, accumulation)]
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise ConfigError(
            f"not a batch: {text_of(per_device)} per device, {text_of(accumulation)} accumulated"
            "\nhint: batch_size=16"
        )
    num_devices = count_devices(values.get("devices") or "auto")
    values["batch_size"] = numbers[0] * numbers[1] * num_devices
    factors = f" {_TIMES} ".join(str(number) for number in (*numbers, num_devices))
    notes.append(f"batch_size: {values['batch_size']} ({factors} devices)")
