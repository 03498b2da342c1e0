"""What settings must hold: values that are text for something else, and settings that disagree."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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


def contradictions(config: TrainConfig) -> list[str]:
    """What two settings of one config say against each other, each with a way out."""
    has_eval = config.eval_dataset is not None or config.val_size is not None
    rules = (
        (
            config.eval_dataset is not None and config.val_size is not None,
            "eval_dataset and val_size are both given\nhint: leave one of them out",
        ),
        (
            config.eval_strategy != "no" and not has_eval,
            f"eval_strategy: {config.eval_strategy}, but there is no data to evaluate on"
            "\nhint: val_size=0.1, or eval_dataset=FILE.jsonl",
        ),
        (
            config.eval_strategy == "steps" and config.eval_steps is None,
            "eval_strategy: steps, but not how many\nhint: eval_steps=50",
        ),
        (
            config.min_lr_ratio is not None and config.lr_scheduler_type != "cosine",
            f"min_lr_ratio needs a cosine schedule, not: {config.lr_scheduler_type}"
            "\nhint: lr_scheduler_type=cosine",
        ),
        (
            config.finetuning_type == "qlora" and config.use_dora,
            "use_dora takes the size of the base weights apart, and qlora packs them"
            "\nhint: use_dora=false, or finetuning_type=lora",
        ),
        (
            config.finetuning_type == "qlora" and _reads_weights(config.peft or {}),
            "peft: init_lora_weights takes the base weights apart, and qlora packs them"
            "\nhint: leave it out, or finetuning_type=lora",
        ),
        (
            config.train_on_prompt and config.mask_history,
            "train_on_prompt and mask_history ask for opposite things\nhint: leave one of them out",
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
    return [problem for broken, problem in rules if broken]


def _reads_weights(peft: dict[str, Any]) -> bool:
    """Whether an adapter is to start from the weights that it is put on."""
    start = peft.get("init_lora_weights")
    return isinstance(start, str) and start not in ("gaussian", "orthogonal")
