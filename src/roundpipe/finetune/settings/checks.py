"""What settings must hold: values that are text for something else, and settings that disagree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.settings.peft_fields import why_not_trained

if TYPE_CHECKING:
    from roundpipe.finetune.settings.fields import TrainConfig

DEVICE = re.compile(r"(auto|cpu|cuda|cuda:\d+|\d+)(\s*\*\s*[1-9]\d*)?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


def bytes_of(given: Any, example: str) -> int:
    """An amount such as 20GB in bytes."""
    found = _MEMORY.fullmatch(str(given).strip())
    if not found:
        raise ValueError(f"not an amount of memory: {given}\nhint: {example}")
    number, prefix, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower())
    return round(float(number) * factor)


Rule = tuple[bool, str]


def contradictions(config: TrainConfig) -> list[str]:
    """What two settings of one config say against each other, each with a way out."""
    rules = (*_of_method(config), *_of_evaluation(config), *_of_saving(config), *_of_work(config))
    return [problem for broken, problem in rules if broken]


def _of_method(config: TrainConfig) -> tuple[Rule, ...]:
    method = config.finetuning_type
    against = why_not_trained(config.peft or {})
    return (
        (against is not None, f"peft: {against}"),
        (
            method == "qlora" and config.use_dora,
            "use_dora takes the size of the base weights apart, and qlora packs them"
            "\nhint: use_dora=false, or finetuning_type=lora",
        ),
        (
            method == "qlora" and _reads_weights(config.peft or {}),
            "peft: init_lora_weights takes the base weights apart, and qlora packs them"
            "\nhint: leave it out, or finetuning_type=lora",
        ),
        (
            config.unfrozen_parameters is not None and method != "freeze",
            f"unfrozen_parameters trains a part of the weights, not finetuning_type: {method}"
            "\nhint: finetuning_type=freeze, or leave unfrozen_parameters out",
        ),
        (
            config.unfrozen_parameters is None and method == "freeze",
            "finetuning_type: freeze, but not what stays trainable"
            "\nhint: unfrozen_parameters=layers:-2 trains the last two layers",
        ),
        (
            config.adapter_name_or_path is not None and method in ("full", "freeze"),
            f"adapter_name_or_path starts from an adapter, not finetuning_type: {method}"
            "\nhint: finetuning_type=lora, or merge the adapter first and train on that",
        ),
    )


def _of_evaluation(config: TrainConfig) -> tuple[Rule, ...]:
    has_data = config.eval_dataset is not None or config.val_size is not None
    evaluates = config.eval_strategy != "no"
    turn_on = "\nhint: val_size=0.1, or eval_dataset=FILE.jsonl"
    if has_data:
        turn_on = "\nhint: eval_strategy=epoch"
    return (
        (
            config.eval_dataset is not None and config.val_size is not None,
            "eval_dataset and val_size are both given\nhint: leave one of them out",
        ),
        (
            evaluates and not has_data,
            f"eval_strategy: {config.eval_strategy}, but there is no data to evaluate on{turn_on}",
        ),
        (
            config.eval_strategy == "steps" and config.eval_steps is None,
            "eval_strategy: steps, but not how many\nhint: eval_steps=50",
        ),
        (
            config.load_best_model_at_end and not evaluates,
            f"load_best_model_at_end needs an evaluation to tell the best by{turn_on}",
        ),
        (
            config.early_stopping_patience is not None and not evaluates,
            f"early_stopping_patience needs an evaluation that gets no better{turn_on}",
        ),
    )


def _of_saving(config: TrainConfig) -> tuple[Rule, ...]:
    evaluates = config.eval_strategy != "no"
    folder = config.resume_from_checkpoint
    return (
        (
            config.save_strategy == "best" and not evaluates,
            "save_strategy: best needs an evaluation to tell the best by"
            "\nhint: val_size=0.1 eval_strategy=epoch, or save_strategy=minutes",
        ),
        (
            config.save_strategy == "steps" and config.save_steps is None,
            "save_strategy: steps, but not how many\nhint: save_steps=500",
        ),
        (
            folder not in ("auto", "none") and not Path(folder).expanduser().is_dir(),
            f"no such checkpoint: resume_from_checkpoint: {folder}"
            "\nhint: resume_from_checkpoint=auto, none, or the folder of a checkpoint",
        ),
    )


def _of_work(config: TrainConfig) -> tuple[Rule, ...]:
    schedule = config.lr_scheduler_type
    decays = ("cosine", "cosine_with_min_lr", "warmup_stable_decay")
    return (
        (
            config.min_lr_ratio is not None and schedule not in decays,
            f"min_lr_ratio needs a schedule that falls to it, not: {schedule}"
            "\nhint: lr_scheduler_type=cosine",
        ),
        (
            config.min_lr_ratio is None and schedule == "cosine_with_min_lr",
            "lr_scheduler_type: cosine_with_min_lr, but not to which share of the peak rate"
            "\nhint: min_lr_ratio=0.1",
        ),
        (
            config.lr_scheduler_kwargs is not None and schedule not in decays,
            f"lr_scheduler_kwargs: not of lr_scheduler_type: {schedule}\nhint: leave it out",
        ),
        (
            config.fp16_accumulation and config.dtype in ("bf16", "fp32"),
            f"fp16_accumulation sums products of fp16, not dtype: {config.dtype}"
            "\nhint: dtype=fp16, or fp16_accumulation=false",
        ),
        (
            config.train_on_prompt and config.mask_history,
            "train_on_prompt and mask_history ask for opposite things\nhint: leave one of them out",
        ),
        (
            config.packing and config.train_sampling_strategy == "group_by_length",
            "packing fills rows whatever the length, group_by_length has nothing left to group"
            "\nhint: leave one of them out",
        ),
        (
            config.micro_batch_size is not None
            and config.num_microbatch is not None
            and -(-config.batch_size // config.micro_batch_size) != config.num_microbatch,
            f"batch_size: {config.batch_size} is not num_microbatch: {config.num_microbatch} "
            f"microbatches of micro_batch_size: {config.micro_batch_size}"
            "\nhint: leave one of them out",
        ),
    )


def _reads_weights(peft: dict[str, Any]) -> bool:
    """Whether an adapter is to start from the weights that it is put on."""
    start = peft.get("init_lora_weights")
    return isinstance(start, str) and start not in ("gaussian", "orthogonal")
