"""Values of our own keys in the words of other trainers, and the words that are still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys

if TYPE_CHECKING:
    from collections.abc import Mapping


def translate_words(values: dict[str, Any], notes: list[str]) -> None:
    """Names of values, where the key is ours and the word another trainer's."""
    _translate_word("optim", keys.OPTIMIZERS, values, notes)
    _translate_8bit(values, notes)
    _translate_word("dtype", keys.DTYPES, values, notes)
    _translate_word("lr_scheduler_type", {"cosine_with_min_lr": "cosine"}, values, notes)
    _translate_word("truncation", {"truncate": "cut", "raise": "error"}, values, notes)
    _translate_word("attn_implementation", _FLASH, values, notes)
    _translate_word("chat_template", {"tokenizer_default": "auto"}, values, notes)
    _refuse_words(values)
    if isinstance(values.get("target_modules"), str):
        values["target_modules"] = _targets(values["target_modules"])
    for field in ("modules_to_save", "target_parameters"):
        if isinstance(values.get(field), str):
            values[field] = _names(values[field])
    if values.get("val_size") == 0:
        del values["val_size"]
    for field in ("report_to", "sample_prompts"):
        if values.get(field) in ([], ["none"], ["None"], [None]):
            del values[field]
    for field in ("dataset", "eval_dataset"):
        if values.get(field) is not None:
            given = values[field]
            entries = given if isinstance(given, list | tuple) else [given]
            values[field] = [_entry(entry, notes) for entry in entries]


_FLASH = dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2", "flash"), "sdpa")

_WORDS_LATER = {
    ("finetuning_type", "freeze"): "finetuning_type=lora",
    ("lr_scheduler_type", "warmup_stable_decay"): "lr_scheduler_type=cosine",
    ("lr_scheduler_type", "wsd"): "lr_scheduler_type=cosine",
    **{
        ("report_to", name): "report_to=none: trainer_log.jsonl has every value"
        for name in ("all", "tensorboard", "wandb", "mlflow", "trackio")
    },
}


def _translate_word(
    field: str, words: Mapping[str, str], values: dict[str, Any], notes: list[str]
) -> None:
    value = values.get(field)
    if isinstance(value, str) and value in words:
        values[field] = words[value]
        notes.append(f"{field}: {value} is {words[value]}")


def _translate_8bit(values: dict[str, Any], notes: list[str]) -> None:
    """An optimizer with 8-bit moments; what is said of the moments themselves counts more."""
    value = values.get("optim")
    if value in keys.OPTIMIZERS_8BIT:
        values["optim"] = "adamw_torch"
        state = values.setdefault("optim_state_dtype", "int8")
        notes.append(f"optim: {value} is adamw_torch with optim_state_dtype: {state}")


def _refuse_words(values: Mapping[str, Any]) -> None:
    for (field, word), way_out in _WORDS_LATER.items():
        value = values.get(field)
        if value in (word, [word]):
            raise ConfigError(f"not yet: {field}: {word}\nhint: {way_out}")
    if isinstance(values.get("eval_steps"), float) and 0 < values["eval_steps"] < 1:
        raise ConfigError(
            f"not yet: eval_steps: {values['eval_steps']} as a share\nhint: eval_steps=50, or "
            "eval_strategy=epoch"
        )


def _targets(text: str) -> str | list[str]:
    if text in ("all", "all-linear"):
        return "all-linear"
    # A comma list is names; anything else may be a regular expression, which peft reads itself.
    return _names(text) if "," in text or text.isidentifier() else text


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _entry(entry: Any, notes: list[str]) -> Any:
    """One entry of a dataset list with its keys and words as ours."""
    if not isinstance(entry, dict):
        return entry
    ours: dict[str, Any] = {}
    for raw, value in entry.items():
        key = keys.ENTRY_ALIASES.get(str(raw), str(raw))
        column = keys.ENTRY_COLUMNS.get(str(key))
        if column is not None and isinstance(value, str):
            ours.setdefault("columns", {})[column] = value
            notes.append(f"{key}: {value} is columns: {{{column}: {value}}}")
        elif key in keys.ENTRY_LATER and not is_empty(value):
            raise ConfigError(
                f"not yet: {key}: {text_of(value)} of a dataset"
                "\nhint: path: FILE.jsonl, a file of its own"
            )
        elif key not in keys.ENTRY_NEEDLESS and key not in keys.ENTRY_LATER:
            ours[key] = value
    kind = ours.get("type")
    if isinstance(kind, str):
        ours["type"] = keys.ENTRY_TYPES.get(kind, kind)
    return ours


def is_empty(value: Any) -> bool:
    """Whether a foreign value asks for nothing."""
    return value is None or value is False or value in ("", [], {}, ())


def text_of(value: Any) -> str:
    """A value as a config would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
