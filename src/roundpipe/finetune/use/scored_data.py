"""The data that a result is scored on, as samples: what the run has evaluated on, unless other is
named.

Everything of it (template, what counts in the loss, lengths, the split that was held out) is read
as `roundpipe train` reads it, so a run's own evaluation data are the very samples it has used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.dataset import Dataset, Stats, load_dataset, stats_of
from roundpipe.finetune.use.request import NO_DATA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.data.samples import Samples
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.settings.config import DatasetEntry, TrainConfig
    from roundpipe.finetune.use.eval_wish import Choice

_NO_DATA = (
    "no data to score on: none is named\nhint: dataset=FILE.jsonl, or a hub id: "
    "dataset='{path: openai/gsm8k, name: main, split: test}'"
)


@dataclass(frozen=True)
class ScoredData:
    """``name``: for people; ``lines``: what they should know of it; ``shapes``: (path, shape)."""

    samples: Samples
    name: str
    stats: Stats
    lines: Sequence[str] = ()
    shapes: Sequence[tuple[str, str]] = ()


def scored_config(settings: TrainConfig, choice: Choice) -> TrainConfig:
    """The config of a run whose data are what is to be scored: ``dataset``, or of it ``val_size``.

    Raises ConfigError where no data are named.
    """
    if choice.is_held_out or (not choice.is_named and settings.eval_dataset is None):
        if settings.dataset[0].path == NO_DATA:
            raise ConfigError(_NO_DATA)
        if settings.val_size is None:
            raise ConfigError(
                "no data to score on: the run has neither eval_dataset nor val_size\n"
                f"hint: dataset=FILE.jsonl; dataset={settings.dataset[0].path} is what it was "
                "trained on"
            )
        entries, most = settings.dataset, None  # which rows are held out hangs on all of them
        val_size = settings.val_size
    else:
        named = settings.dataset if choice.is_named else settings.eval_dataset
        assert named is not None
        entries, val_size, most = named, None, choice.most
    if any(entry.path == NO_DATA for entry in entries):
        raise ConfigError(_NO_DATA)
    return settings.model_copy(
        update={
            "dataset": tuple(_changed(entry, choice.split, most) for entry in entries),
            "eval_dataset": None,
            "val_size": val_size,
        }
    )


def _changed(entry: DatasetEntry, split: str | None, most: int | None) -> DatasetEntry:
    changes: dict[str, Any] = {} if split is None else {"split": split}
    if most is not None:
        changes["max_samples"] = min(most, entry.max_samples or most)
    return entry.model_copy(update=changes)


def load_scored(
    config: TrainConfig,
    choice: Choice,
    tokenizer: Any,
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
) -> ScoredData:
    """Read and tokenise the data of `scored_config`; blocks. Raises DataError."""
    dataset = load_dataset(config, tokenizer, counting=terminal.counting, environment=environment)
    samples = dataset.samples if config.val_size is None else dataset.eval_samples
    if choice.most is not None and choice.most < len(samples):
        samples = samples[: choice.most]
    return ScoredData(samples, _name(config), stats_of(samples), _lines(dataset), dataset.shapes)


def _name(config: TrainConfig) -> str:
    """``gsm8k/test.jsonl``, ``openai/gsm8k (main, test)``."""
    names = []
    for entry in config.dataset:
        parts = [part for part in (entry.name, entry.split) if part]
        names.append(f"{entry.path} ({', '.join(parts)})" if parts else entry.path)
    told = ", ".join(names)
    return told if config.val_size is None else f"{told}, of which val_size={config.val_size:g}"


def _lines(dataset: Dataset) -> list[str]:
    """What was cut, left out or odd; where tokens are kept is of no interest here."""
    notes = [note for note in dataset.account.notes if not note.startswith("tokens: ")]
    return [*dataset.account.warnings(dataset.limit), *notes]
