"""How long a whole job takes: its steps, each of microbatches padded to their longest row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.finetune.forecast.speed import bound_seconds
from roundpipe.report.forecast import Duration

if TYPE_CHECKING:
    from roundpipe.finetune.forecast.speed import Speed
    from roundpipe.finetune.forecast.wish import Wish


def _is_data_elsewhere(wish: Wish) -> bool:
    """Whether data would have to be downloaded to be measured, which a plan never does."""
    if not wish.has_dataset:
        return False
    from roundpipe.finetune.data.files import is_hub_id  # noqa: PLC0415

    return any(is_hub_id(entry) for entry in wish.config.dataset)


def data_notes(wish: Wish) -> list[str]:
    """What a plan cannot know of the data."""
    if _is_data_elsewhere(wish):
        return ["a plan downloads no data: how long the job takes is not known"]
    return []


def duration(wish: Wish, speed: Speed) -> Duration | None:
    """The whole job: microbatches are padded to their longest row, not to ``max_length``."""
    config = wish.config
    if not wish.has_dataset or _is_data_elsewhere(wish):
        if config.max_steps is None:
            return None
        return Duration(config.max_steps, config.max_steps * speed.seconds, "max_steps")
    from roundpipe.finetune.forecast.data import local_tokenizer, measure_data  # noqa: PLC0415

    data = measure_data(config, local_tokenizer(wish.model))
    steps = data.steps(config)
    microbatches = -(-config.batch_size // speed.size)
    mean = max(round(data.padded_length(config.batch_size, microbatches)), 2)
    full = bound_seconds(speed.case, size=speed.size)
    seconds = speed.seconds * bound_seconds(speed.case, size=speed.size, length=mean) / full
    names = ", ".join(Path(entry.path).name for entry in config.dataset)
    epochs = f"{config.num_train_epochs:g} epoch{'' if config.num_train_epochs == 1 else 's'}"
    what = f"{epochs} of {names}" if config.max_steps is None else names
    about = "" if data.is_exact else "about "
    return Duration(
        steps,
        steps * seconds,
        what,
        f"{about}{data.samples:,} samples, batches of {about}{mean:,} tokens a sample",
    )
