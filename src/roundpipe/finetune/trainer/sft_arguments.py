"""TrainingArguments and TRL's SFTConfig as settings of ours, defaults and all."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import text_of
from roundpipe.finetune.trainer.adapter_values import adapter_values, is_packing
from roundpipe.finetune.trainer.argument_fields import (
    FILLED,
    NEEDLESS,
    NEUTRAL,
    REFUSED,
    TRANSLATED,
)
from roundpipe.finetune.trainer.model_init_kwargs import model_values
from roundpipe.finetune.trainer.told import NO_LIMIT, About, Preparation

if TYPE_CHECKING:
    from collections.abc import Callable

    Get = Callable[[str, Any], Any]  # a field of SFTConfig, or its default

_SFT_LENGTH = 1024  # TRL's max_length

# Fields whose name and meaning are ours.
_SAME = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "data_seed",
    "gradient_accumulation_steps",
    "learning_rate",
    "load_best_model_at_end",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "output_dir",
    "per_device_train_batch_size",
    "run_name",
    "save_only_model",
    "save_total_limit",
    "seed",
    "warmup_steps",
    "weight_decay",
)


def theirs(args: Any, about: About, *, is_default: bool) -> tuple[dict[str, Any], list[str]]:
    """Values of our settings, data aside, and lines to be said. Raises ConfigError by name.

    ``is_default``: nobody gave arguments, and precision is the device's.
    """
    is_sft = is_default or is_sft_config(args)
    _refuse_other_trainers(args, is_sft=is_sft)
    _refuse(args)
    get = _reader(args, is_sft=is_sft)
    values: dict[str, Any] = {name: _plain(getattr(args, name)) for name in _SAME}
    values |= _when(args) | _optimizer(args) | _text_values(get)
    values["train_sampling_strategy"] = _order(args, get("shuffle_dataset", False))
    values["project"] = _project(args)
    if args.use_cpu:
        values["devices"] = "cpu"
    init = {} if about.is_loaded else dict(get("model_init_kwargs", None) or {})
    quantization = _one(about.quantization_config, init.pop("quantization_config", None))
    loading, dtype, notes = model_values(init, about.model_name)
    values |= {"model_name_or_path": about.model_name, **loading}
    values["dtype"] = _dtype(args, dtype, about, is_default=is_default)
    values |= _method(about, quantization)
    values["resume_from_checkpoint"] = "none"
    return values, notes + _not_needed(args)


def is_sft_config(args: Any) -> bool:
    """Whether arguments are TRL's SFTConfig, or of a class made from it."""
    return any(kind.__name__ == "SFTConfig" for kind in type(args).__mro__)


def preparation_of(args: Any, *, is_default: bool = False) -> Preparation:
    """How these arguments have rows read. Raises ConfigError."""
    is_sft = is_default or is_sft_config(args)
    get = _reader(args, is_sft=is_sft)
    options = get("dataset_kwargs", None) or {}
    if unknown := options.keys() - {"skip_prepare_dataset"}:
        raise ConfigError(
            f"not supported: dataset_kwargs: {', '.join(sorted(unknown))}"
            "\nhint: dataset_kwargs={'skip_prepare_dataset': True}, or leave it out"
        )
    return Preparation(
        is_theirs=True,
        text_column=get("dataset_text_field", "text"),
        answers_only=bool(get("assistant_only_loss", False)),
        completion_only=get("completion_only_loss", None),
        packing_strategy=get("packing_strategy", "bfd"),
        takes_as_is=bool(options.get("skip_prepare_dataset")),
        cuts_tokens=is_sft,
        removes_columns=bool(args.remove_unused_columns),
    )


def _reader(args: Any, *, is_sft: bool) -> Get:
    return lambda name, default: getattr(args, name, default) if is_sft else default


def _refuse_other_trainers(args: Any, *, is_sft: bool) -> None:
    kind = next((k for k in type(args).__mro__ if k.__module__.startswith("trl.")), None)
    if kind is not None and not is_sft:
        raise ConfigError(
            f"not supported: args={kind.__name__}(…): only supervised fine-tuning"
            "\nhint: args=SFTConfig(…), or TrainingArguments(…)"
        )


def _refuse(args: Any) -> None:
    metric = args.metric_for_best_model
    if metric is not None and not str(metric).endswith("loss"):
        raise ConfigError(
            f"not supported: metric_for_best_model={metric}: evaluation gives the loss"
            "\nhint: metric_for_best_model=eval_loss"
        )
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name, way_out in REFUSED.items():
        if name not in defaults:
            continue
        value = getattr(args, name)
        if value not in (defaults[name], None, False, *NEUTRAL.get(name, ())):
            raise ConfigError(f"not supported: {name}={text_of(value)}\nhint: {way_out}")


def _not_needed(args: Any) -> list[str]:
    """Lines that name what was set and is not needed, and what nobody here knows."""
    needless, unknown = [], []
    for each in dataclasses.fields(args):
        value = getattr(args, each.name)
        is_default = each.default_factory is not dataclasses.MISSING or value == each.default
        if is_default or each.name in FILLED or value in (None, False, [], {}, ""):
            continue
        if each.name in NEEDLESS:
            needless.append(each.name)
        elif each.name not in TRANSLATED and each.name not in REFUSED:
            unknown.append(each.name)
    lines = [f"not needed here: {', '.join(needless)}"] if needless else []
    return lines + ([f"not used: {', '.join(unknown)} (not of this trainer)"] if unknown else [])


def _when(args: Any) -> dict[str, Any]:
    """When to log, evaluate and save, as far as settings can say it."""
    every = args.logging_steps
    evaluates, saves = _plain(args.eval_strategy), _plain(args.save_strategy)
    return {
        "logging_steps": int(every) if every >= 1 else 1,
        "eval_strategy": evaluates,
        "eval_steps": args.eval_steps if evaluates == "steps" else None,
        "save_strategy": saves,
        "save_steps": args.save_steps if saves == "steps" else None,
    }


def _optimizer(args: Any) -> dict[str, Any]:
    """Optimizer and warm-up; the share of steps that warms up is a field of earlier versions."""
    optim = str(_plain(args.optim))
    values = {
        "optim": "adamw_torch" if optim == "adamw_torch_fused" else optim,  # nobody chose that one
        "max_grad_norm": args.max_grad_norm or None,
    }
    share = getattr(args, "warmup_ratio", None)
    return values | ({"warmup_ratio": share} if share else {})


def _project(args: Any) -> str | None:
    project = getattr(args, "project", None)
    return None if project == "huggingface" else project


def _order(args: Any, shuffles: bool) -> str:
    """The order of the rows; ``group_by_length`` is a field of earlier versions."""
    if getattr(args, "group_by_length", False):
        return "group_by_length"
    order = str(_plain(getattr(args, "train_sampling_strategy", "random")))
    return "random" if shuffles and order == "sequential" else order


def _dtype(args: Any, loaded: str | None, about: About, *, is_default: bool) -> str:
    """Mixed precision by name; else what the weights are in."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    if about.is_loaded:
        name = str(about.dtype).removeprefix("torch.")
        return {"bfloat16": "bf16", "float16": "fp16"}.get(name, "fp32")
    return loaded or ("auto" if is_default else "fp32")


def _method(about: About, quantization: Any) -> dict[str, Any]:
    """What is trained: an adapter where one is given, else everything."""
    packs = is_packing(quantization)
    if about.is_loaded and packs:
        raise ConfigError(
            "quantization_config packs a model while it is loaded, and model is one already"
            "\nhint: model=NAME_OR_FOLDER"
        )
    if about.peft_config is not None:
        return adapter_values(about.peft_config, quantization, is_adapter=about.is_adapter)
    if packs:
        raise ConfigError(
            "quantization_config without peft_config: weights in 4 bits cannot be trained"
            "\nhint: peft_config=LoraConfig()"
        )
    return {"finetuning_type": "lora" if about.is_adapter else "full"}


def _text_values(get: Get) -> dict[str, Any]:
    length = get("max_length", _SFT_LENGTH)
    if get("packing", False) and length is None:
        raise ConfigError("packing fills rows of max_length tokens\nhint: max_length=1024")
    eos = get("eos_token", None)
    return {
        "chat_template": get("chat_template_path", None),
        "special_tokens": None if eos is None else {"eos_token": eos},
        "max_length": NO_LIMIT if length is None else length,
        "packing": bool(get("packing", False)),
    }


def _one(beside: Any, inside: Any) -> Any:
    """The one of two that is given."""
    if beside is not None and inside is not None:
        raise ConfigError(
            "quantization_config is given twice: in model_init_kwargs, and beside args"
            "\nhint: leave one of them out"
        )
    return inside if beside is None else beside


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
