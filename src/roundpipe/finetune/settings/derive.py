"""Foreign keys whose meaning hangs on their value, a rule each.

A rule takes its key, the value and all values so far (it may take from them what it sets anew), and
returns the fields that it sets, or the sentence that says why it sets none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.account import NOTHING, is_empty, short_text, text_of
from roundpipe.finetune.settings.cadence import evals_per_epoch, saves_per_epoch, warmup_ratio
from roundpipe.finetune.settings.freezing import unfrozen_layers, unfrozen_others
from roundpipe.finetune.settings.reporters import LOGGERS, reporters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roundpipe.finetune.settings.account import Account

Values = dict[str, Any]


def derive(key: str, values: Values, account: Account) -> None:
    """Replace a foreign key by the field it means. Raises ConfigError for two that disagree."""
    if key not in values:  # another rule took it
        account.sets(key, keys.DERIVED[key])
        return
    value = values.pop(key)
    if is_empty(value) and value is not False and key != "adapter":
        account.leaves(key, NOTHING)
        return
    fields = RULES[key](key, value, values)
    if isinstance(fields, str):
        account.leaves(key, fields)
        if fields.startswith("not used: "):
            why = fields.removeprefix("not used: ")
            account.say(f"not used: {key}: {text_of(value)} ({why})", in_table=True)
        return
    for field, new in fields.items():
        if field in values and values[field] != new:
            raise ConfigError(
                f"{key}: {text_of(value)} and {field}: {text_of(values[field])} disagree"
                "\nhint: leave one of them out"
            )
        values[field] = new
        text = f"{key}: {short_text(value)} is {field}: {short_text(new)}"
        account.say(text, in_table=True)
    if key not in values:  # else another rule has the last word
        account.sets(key, fields)


def _adapter(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    if value is None and "finetuning_type" in values:
        return NOTHING
    value = "full" if is_empty(value) else value
    if value == "full" and values.get("unfrozen_parameters"):
        value = "freeze"
    return {} if _is_lora_of_4_bits(value, values) else {"finetuning_type": value}


def _use_peft(key: str, value: Any, values: Values) -> dict[str, Any]:
    value = "lora" if value else "full"
    return {} if _is_lora_of_4_bits(value, values) else {"finetuning_type": value}


def _full(key: str, value: Any, values: Values) -> dict[str, Any]:
    return {"finetuning_type": "full"} if value else {}


def _is_lora_of_4_bits(method: str, values: Mapping[str, Any]) -> bool:
    """Whether another key has said already that the weights below an adapter are in 4 bits."""
    return method == "lora" and values.get("finetuning_type") == "qlora"


def _quantized(key: str, value: Any, values: Values) -> dict[str, Any]:
    if not value:
        return {}
    if key == "load_in_8bit" or (key == "quantization_bit" and value != 4):
        raise ConfigError(
            f"not supported: {key}: {text_of(value)} (base weights in other than 4 or 16 bits)"
            f"\nhint: finetuning_type=qlora, or {key}=none: weights live in host memory, so the "
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


def _revision(key: str, value: Any, values: Values) -> dict[str, Any]:
    model = values.pop("model_name_or_path", "")
    return {"model_name_or_path": f"{str(model).partition('@')[0]}@{value}"}


def _tokenizer(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    if str(value) != str(values.get("model_name_or_path", "")).partition("@")[0]:
        raise ConfigError(
            f"not supported: {key}: {value}\nhint: {key}=none: the model's own tokenizer is used"
        )
    return "not needed: the model's own tokenizer is used"


_NOT_LINEAR = {"embed_tokens", "lm_head", "wte"}  # of the names that adapters are put on
_DTYPES = {"pure_bf16": "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _precision(key: str, value: Any, values: Values) -> dict[str, Any]:
    is_wanted = value is True or str(value).lower() in ("true", "full")
    return {"dtype": _DTYPES.get(key, key)} if is_wanted else {}


def _attention(key: str, value: Any, values: Values) -> dict[str, Any]:
    if key == "eager_attention" or value == "disabled":
        return {"attn_implementation": "eager"} if value else {}
    return {"attn_implementation": "sdpa"} if value and value != "auto" else {}


def _on_cpu(key: str, value: Any, values: Values) -> dict[str, Any]:
    return {"devices": "cpu"} if value else {}


def _all_linear(key: str, value: Any, values: Values) -> dict[str, Any]:
    """Every linear layer, those that are named beside it among them."""
    named = values.get("target_modules")
    if not value:
        return {}
    if isinstance(named, list | tuple) and not _NOT_LINEAR.intersection(named):
        del values["target_modules"]
    return {"target_modules": "all-linear"}


def _pissa(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    """The exact start, whatever ``pissa_iter`` says: an iterated one cannot be made again."""
    values.pop("pissa_iter", None)
    if not value or key == "pissa_iter":
        return "not needed: the adapter starts as it always does"
    return _into_peft(values, "init_lora_weights", "pissa")


def _peft(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    field = keys.TO_PEFT[key]
    if value is False or (field, value) in (("init_lora_weights", True), ("bias", "none")):
        return NOTHING
    return _into_peft(values, field, value)


def _into_peft(values: Values, field: str, value: Any) -> dict[str, Any]:
    known = values.pop("peft", None) or {}
    if field in known and known[field] != value:
        raise ConfigError(
            f"{field} is given twice: {text_of(known[field])} and {text_of(value)}"
            "\nhint: leave one of them out"
        )
    return {"peft": {**known, field: value}}


ANSWERS_ONLY = ("assistant_only_loss", "completion_only_loss", "train_on_completions")


def _inverted(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    """One of the three keys of TRL and unsloth; a yes of any of them means the answers alone."""
    if value is False and any(values.get(other) is True for other in ANSWERS_ONLY):
        return "not needed: another key says that answers alone are trained"
    if value is True:
        for other in ANSWERS_ONLY:
            values.pop(other, None)
    return {"train_on_prompt": True} if value is False else {}


def _packing(key: str, value: Any, values: Values) -> dict[str, Any]:
    if not value:
        return {}
    values.pop("packing", None)  # `packing: false` beside it means the plain way of packing
    return {"packing": True}


def _order(key: str, value: Any, values: Values) -> dict[str, Any]:
    name = "group_by_length" if key == "group_by_length" else "sequential"
    return {"train_sampling_strategy": name} if value else {}


def _resume(key: str, value: Any, values: Values) -> dict[str, Any]:
    if not value or values.get("resume_from_checkpoint"):
        return {}
    values.pop("resume_from_checkpoint", None)
    return {"resume_from_checkpoint": "auto"}


def _seed(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    if values.get("seed") not in (None, value):
        return f"not used: seed: {values['seed']} counts"
    return {"seed": value}


def _logger(key: str, value: Any, values: Values) -> dict[str, Any]:
    """A key that turns a logger on, or names its project."""
    name = next(each for each in LOGGERS if each in key)
    is_project = key.endswith(("_project", "_project_name", "_experiment_name"))
    others = reporters(values.pop("report_to", None))
    if not value:  # said no to, whatever else names it
        values.pop(f"{name}_project", None)
        return {"report_to": [each for each in others if each != name]}
    fields: dict[str, Any] = {"report_to": [*others, *([] if name in others else [name])]}
    if is_project and values.get("project") is None:
        values.pop("project", None)
        fields["project"] = str(value)
    return fields


def _wandb_mode(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    if value != "disabled":
        return "not needed: wandb reads it from the environment: WANDB_MODE"
    others = [name for name in reporters(values.pop("report_to", None)) if name != "wandb"]
    for turned_on in ("use_wandb", "enable_wandb", "wandb_project"):
        values.pop(turned_on, None)
    return {"report_to": others}


def _special_tokens(key: str, value: Any, values: Values) -> dict[str, Any]:
    """Tokens that are to be in the vocabulary already: none is added to it."""
    listed = value if isinstance(value, list | tuple) else [str(value)]
    new = {"eos_token": str(value)} if key == "eos_token" else {"additional_special_tokens": listed}
    return {"special_tokens": {**(values.pop("special_tokens", None) or {}), **new}}


_PLUGINS = re.compile(r"liger|cut_cross_entropy|kernels|lm_eval|swanlab|expert_parallel")


def _plugins(key: str, value: Any, values: Values) -> str:
    names = value if isinstance(value, list | tuple) else [value]
    others = [str(name) for name in names if not _PLUGINS.search(str(name))]
    if others:
        raise ConfigError(
            f"not supported: {key}: {', '.join(others)}"
            "\nhint: leave it out: no code from outside is loaded"
        )
    return "not needed: logits exist for one microbatch at a time"


def _stage(key: str, value: Any, values: Values) -> dict[str, Any] | str:
    """Supervised fine-tuning, or training on running text; how rows are read is `entries`' part."""
    if value in ("sft", False):
        return "not needed: supervised fine-tuning is what this command does"
    if value == "pt":
        values["stage"] = "pt"
        if values.get("packing") is None:
            values.pop("packing", None)
            return {"packing": True}
        return {}
    raise ConfigError(f"not yet: {key}: {text_of(value)}\nhint: only supervised fine-tuning (sft)")


def _template_file(key: str, value: Any, values: Values) -> dict[str, Any]:
    values.pop("chat_template", None)
    return {"chat_template": str(value)}


def _dataset_arguments(key: str, value: Any, values: Values) -> str:
    if isinstance(value, dict) and value.get("skip_prepare_dataset"):
        raise ConfigError(
            f"not supported: {key}: {text_of(value)}"
            "\nhint: leave it out: the rows of a dataset say what they are"
        )
    return "not needed: the rows of a dataset say what they are"


def _in_entries(key: str, value: Any, values: Values) -> dict[str, Any]:
    """Left for `entries`, where the whole list of datasets is known."""
    values[key] = value
    return {}


RULES: dict[str, Callable[[str, Any, Values], dict[str, Any] | str]] = {
    "full_finetuning": _full,
    "adapter": _adapter,
    "use_peft": _use_peft,
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit"), _quantized),
    "freeze_trainable_layers": unfrozen_layers,
    "freeze_trainable_modules": unfrozen_layers,
    "freeze_extra_modules": unfrozen_others,
    **dict.fromkeys(("model_revision", "revision_of_model", "revision"), _revision),
    "tokenizer_config": _tokenizer,
    **dict.fromkeys(("bf16", "fp16", *_DTYPES), _precision),
    "use_cpu": _on_cpu,
    "no_cuda": _on_cpu,
    **dict.fromkeys((key for key in keys.DERIVED if key.endswith("attention")), _attention),
    "flash_attn": _attention,
    "use_flash_attention_2": _attention,
    "lora_target_linear": _all_linear,
    "pissa_init": _pissa,
    "pissa_iter": _pissa,
    **dict.fromkeys(keys.TO_PEFT, _peft),
    **dict.fromkeys(ANSWERS_ONLY, _inverted),
    "sample_packing": _packing,
    "neat_packing": _packing,
    "group_by_length": _order,
    "disable_shuffling": _order,
    "curriculum_sampling": _order,
    "warmup_ratio": warmup_ratio,
    "evals_per_epoch": evals_per_epoch,
    "saves_per_epoch": saves_per_epoch,
    "auto_resume_from_checkpoints": _resume,
    "random_state": _seed,
    **dict.fromkeys(
        (key for key, fields in keys.DERIVED.items() if fields == ("report_to",)), _logger
    ),
    "wandb_mode": _wandb_mode,
    "eos_token": _special_tokens,
    "tokens": _special_tokens,
    "plugins": _plugins,
    "stage": _stage,
    "rl": _stage,
    "template": lambda key, value, values: "not used: the model's own; see the marked sample",
    "chat_template_jinja": _template_file,
    "dataset_kwargs": _dataset_arguments,
    **dict.fromkeys(
        (
            "dataset_dir",
            "pretraining_dataset",
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "dataset_test_split",
            "dataset_text_field",
            "format_type",
            "max_samples",
        ),
        _in_entries,
    ),
}
