"""What a Trainer is told by ``args``, in whose words ever, as a TrainConfig.

    None, TrainingArguments, SFTConfig   their own defaults, field by field (`sft_arguments`)
    a dict                               keys of ours, or of theirs as a config file may have them
    a TrainConfig                        as it is

TRL need not be installed: its config is told by its name. Callbacks are shown TrainingArguments in
every case; where none were given they are made to say the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import TrainConfig, make_config, read_layers
from roundpipe.finetune.trainer.adapter_values import adapter_values
from roundpipe.finetune.trainer.made_arguments import arguments_for, default_arguments
from roundpipe.finetune.trainer.sft_arguments import is_sft_config, preparation_of, theirs
from roundpipe.finetune.trainer.told import IN_MEMORY, About, Told
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAY_METHOD = {"adapter", "finetuning_type", "method", "tuner_type", "use_peft"}
_SAY_DATA = {"dataset", "dataset_name", "datasets", "pretraining_dataset", "train_file"}


def read_arguments(  # noqa: PLR0913 - what stands beside args in a Trainer's own order
    args: Any,
    model: Any,
    *,
    peft_config: Any = None,
    quantization_config: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    environment: Mapping[str, str] | None = None,
) -> Told:
    """Read a Trainer's ``args`` and what stands beside them.

    Of ``TrainingArguments`` and ``SFTConfig`` every field counts, defaults too. ``model``: a name
    or folder, or a model, bare, under peft or in a `RoundPipe`, whose devices count; else asks for
    devices where a batch is given per device. Raises ConfigError for what is not supported, by
    name.
    """
    about = About(
        **_facts_of(model),
        peft_config=peft_config,
        quantization_config=quantization_config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        environment=environment,
    )
    if args is None:
        return _read_theirs(default_arguments(about.model_name), about, is_default=True)
    if isinstance(args, TrainConfig | dict):
        return _read_ours(args, about)
    if dataclasses.is_dataclass(args) and not isinstance(args, type) and hasattr(args, "optim"):
        return _read_theirs(args, about)
    raise ConfigError(
        f"args is a {type(args).__name__}"
        "\nhint: args=SFTConfig(…), TrainingArguments(…), or {'learning_rate': 2e-4}"
    )


def _facts_of(model: Any) -> dict[str, Any]:
    """What a config hangs on of a model, or of its name."""
    if isinstance(model, str):
        return {"model_name": model}
    is_wrapped = isinstance(model, RoundPipe)
    inner = model.model if is_wrapped else model
    name = getattr(getattr(inner, "config", None), "_name_or_path", "") or type(inner).__name__
    floating = (p.dtype for p in inner.parameters() if p.dtype.is_floating_point)
    return {
        "model_name": name,
        "is_loaded": True,
        "is_adapter": hasattr(inner, "peft_config"),
        "dtype": next(floating, None),
        "num_devices": len(model.planner.devices) if is_wrapped else None,
    }


def _read_theirs(args: Any, about: About, *, is_default: bool = False) -> Told:
    values, notes = theirs(args, about, is_default=is_default)
    values |= _data_values(about, {})
    given = {key: value for key, value in values.items() if value is not None}
    for key in ("max_grad_norm", "save_total_limit"):  # of which none is a setting
        given[key] = values[key]
    try:
        config, said = _config(given, about)
    except ConfigError as error:
        if not str(error).startswith(("optim:", "lr_scheduler_type:")):
            raise
        what, _, way_out = str(error).partition("\nhint: ")
        own = "optimizers=(optimizer, scheduler) over the parameters of a model of yours"
        raise ConfigError(f"{what}\nhint: {way_out}, or {own}") from error
    preparation = preparation_of(args, is_default=is_default)
    is_sft = is_default or is_sft_config(args)
    return Told(config, args, [*notes, *said], preparation, adds_router_loss=is_sft)


def _read_ours(args: TrainConfig | dict[str, Any], about: About) -> Told:
    given = _as_keys(args)
    about, given = _with_objects(about, given)
    named = {"model", "model_name_or_path", "base_model"} & given.keys()
    for key in named:
        if given.pop(key) != about.model_name and not about.is_loaded:
            raise ConfigError(
                f"{key} is given twice: in args, and model={about.model_name}"
                f"\nhint: leave {key} out of args"
            )
    given["model_name_or_path"] = about.model_name
    given |= _data_values(about, given)
    if about.peft_config is not None or about.quantization_config is not None:
        values = adapter_values(
            about.peft_config, about.quantization_config, is_adapter=about.is_adapter
        )
        given = {**_without_method(given), **values}
    elif about.is_loaded and given.keys().isdisjoint(_SAY_METHOD):
        given["finetuning_type"] = "lora" if about.is_adapter else "full"
    if given.keys().isdisjoint({"resume_from_checkpoint", "auto_resume_from_checkpoints"}):
        given["resume_from_checkpoint"] = "none"
    config, notes = _config(given, about)
    arguments = arguments_for(config)
    return Told(config.model_copy(update={"report_to": ()}), arguments, notes)


def _as_keys(args: TrainConfig | dict[str, Any]) -> dict[str, Any]:
    if isinstance(args, dict):
        return dict(args)
    given = args.model_dump(include=args.model_fields_set)
    if args.dataset[0].path == IN_MEMORY:
        del given["dataset"]
    return given


def _with_objects(about: About, given: dict[str, Any]) -> tuple[About, dict[str, Any]]:
    """Objects out of the keys: what is a section of keys in a file may be an object here."""
    kept = dict(given)
    for key in ("peft_config", "quantization_config"):
        inside = kept.get(key)
        if inside is None or isinstance(inside, dict):
            continue
        if getattr(about, key) is not None:
            raise ConfigError(f"{key} is given twice: in args, and beside\nhint: leave one out")
        about = dataclasses.replace(about, **{key: kept.pop(key)})
    return about, kept


def _without_method(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("finetuning_type", given.get("method")) in ("full", "freeze"):
        raise ConfigError("peft_config trains an adapter\nhint: finetuning_type=lora")
    return {key: value for key, value in given.items() if key not in _SAY_METHOD}


def _data_values(about: About, given: Mapping[str, Any]) -> dict[str, Any]:
    """``dataset`` and ``eval_dataset`` for a config: what names a file, else that it is none."""
    values = {}
    for key, value in (("dataset", about.train_dataset), ("eval_dataset", about.eval_dataset)):
        if value is None:
            continue
        if given.get(key) is not None:
            raise ConfigError(
                f"{key} is given twice: in args, and beside them\nhint: leave one of them out"
            )
        values[key] = value if isinstance(value, str) else IN_MEMORY
    if "dataset" not in values and _SAY_DATA.isdisjoint(given):
        values["dataset"] = IN_MEMORY  # evaluation needs none
    return values


def _config(values: Mapping[str, Any], about: About) -> tuple[TrainConfig, list[str]]:
    count = about.num_devices
    if count is None:
        return make_config(values, environment=about.environment)
    reading = read_layers({}, values, lambda _: count)
    return reading.config, reading.notes
