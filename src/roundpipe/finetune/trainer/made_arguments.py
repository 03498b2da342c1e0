"""TrainingArguments for callbacks, where a Trainer was given none of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from roundpipe.finetune.settings.config import TrainConfig

# What TRL's SFTConfig has other defaults of. Precision is the device's.
_SFT: dict[str, Any] = {"learning_rate": 2e-5, "logging_steps": 10}


def default_arguments(model_name: str) -> TrainingArguments:
    """What a Trainer without arguments goes by; its folder is called after the model, as in TRL."""
    from transformers import TrainingArguments  # noqa: PLC0415, seconds to import

    last = model_name.rstrip("/").rsplit("/", 1)[-1]
    return TrainingArguments(f"{last}-SFT", **_SFT)


def arguments_for(config: TrainConfig) -> TrainingArguments:
    """Arguments that say what ``config`` does, as far as they have words for it.

    Minutes between checkpoints are not among them: the run itself counts those.
    """
    from transformers import TrainingArguments  # noqa: PLC0415, seconds to import

    saves = "no" if config.save_strategy == "minutes" else config.save_strategy
    same = (
        "output_dir",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "num_train_epochs",
        "logging_steps",
        "eval_strategy",
        "save_total_limit",
        "save_only_model",
        "run_name",
        "seed",
        "data_seed",
        "neftune_noise_alpha",
    )
    values: dict[str, Any] = {name: getattr(config, name) for name in same}
    arguments = TrainingArguments(
        **values,
        max_steps=config.max_steps or -1,
        max_grad_norm=config.max_grad_norm or 0.0,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        save_strategy=saves,
        eval_steps=config.eval_steps,
        save_steps=config.save_steps or 500,
        logging_first_step=True,
        report_to=list(config.report_to) or "none",
        use_cpu=config.devices == "cpu",
    )
    # Checks of theirs tie evaluations to checkpoints, which ours need not be.
    arguments.load_best_model_at_end = config.load_best_model_at_end
    needs_best = config.load_best_model_at_end or saves == "best"
    if needs_best or config.early_stopping_patience is not None:
        arguments.metric_for_best_model = config.metric_for_best_model
        arguments.greater_is_better = False
    return arguments
