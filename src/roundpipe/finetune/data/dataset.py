"""The dataset of a run: entries to samples, with an account of what became of every row.

Rows that teach nothing are left out and counted; if that is most of them the run stops before it
trains on nothing. What this returns depends on the files, the tokenizer and the config alone.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.errors import DataError
from roundpipe.finetune.data.account import Account, Stats, stats_of
from roundpipe.finetune.data.cache import REJECTED, TokenCache, default_folder
from roundpipe.finetune.data.encode import encode
from roundpipe.finetune.data.entry_samples import EntrySamples, Tokenizing, samples_of
from roundpipe.finetune.data.marked import marked_sample
from roundpipe.finetune.data.rows import read_rows
from roundpipe.finetune.data.samples import Sample, Samples
from roundpipe.finetune.data.template import use_chat_template, use_special_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from roundpipe.finetune.data.entry_samples import Counting
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

__all__ = [
    "Account",
    "Dataset",
    "Sample",
    "Samples",
    "Stats",
    "encode",
    "load_dataset",
    "marked_sample",
    "read_rows",
    "stats_of",
]

_MOST = 0.5  # share of rows without a trained token from which the run stops


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples to train on, samples to evaluate on, and the account of both.

    ``parts``: of each entry, in ``samples``: (start, stop, weight); a weight is how often an epoch
    sees each sample. ``entries``: a name and the counts of each part. ``shapes``: path and shape of
    every entry, those to evaluate on at the end.
    """

    samples: Samples
    eval_samples: Samples
    parts: tuple[tuple[int, int, float], ...]
    stats: Stats
    eval_stats: Stats
    account: Account
    limit: int
    entries: tuple[tuple[str, Stats], ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()

    def describe(self) -> list[str]:
        """Lines for people: sizes, lengths, and whatever was cut, left out or odd."""
        stats = self.stats
        lines = [
            str(stats),
            f"lengths: half up to {stats.median_length:,} tokens, 90 % up to "
            f"{stats.p90_length:,}, longest {stats.max_length:,} (max_length {self.limit:,})",
        ]
        if len(self.entries) > 1:
            lines += [
                f"  {name}: {part}{f', weight {weight:g}' if weight != 1 else ''}"
                for (name, part), (_, _, weight) in zip(self.entries, self.parts, strict=True)
            ]
        if self.eval_samples:
            lines.append(
                f"evaluation: {self.eval_stats.samples:,} samples, {self.eval_stats.trained:,} "
                "trained tokens"
            )
        return [*lines, *self.account.warnings(self.limit), *self.account.notes]


@contextlib.contextmanager
def _silently(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def load_dataset(
    config: TrainConfig,
    tokenizer: Any,
    *,
    counting: Counting = _silently,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Dataset:
    """Read, tokenise, mask, cut and split what ``config`` names; blocks until all of it is there.

    Sets the tokenizer's chat template if the config names one. ``counting(what, total)`` gives a
    context whose function shows how far it is, in bytes of the files. Tokens are kept in
    ``dataset_prepared_path``, else in the cache that ``environment`` (the process's) names; without
    either they are gone with the process. ``folder``: of the run, where ``rejected.jsonl`` goes.
    Raises DataError for a file or line that cannot be used and where too few rows would teach
    anything, ConfigError for a template that cannot be trained with.
    """
    use_special_tokens(tokenizer, config.special_tokens)
    use_chat_template(tokenizer, config.chat_template)
    account = Account()
    cache = _open_cache(config, environment, account)
    how = Tokenizing(config, tokenizer, cache, folder, counting)
    entries = _load(config.dataset, how, account)
    samples = Samples(entry.part for entry in entries)
    held_out = Samples()
    train: NDArray[np.int64] | None = None
    others: list[EntrySamples] = []
    if config.eval_dataset is not None:
        others = _load(config.eval_dataset, how, account)
        held_out = Samples(entry.part for entry in others)
    elif config.val_size is not None:
        train, chosen = split_rows(samples.rows(), config)
        samples, held_out = samples.take(train), samples.take(chosen)
    parts = _parts(entries, train)
    _note_shared(account, samples, held_out)
    _add_notes(account, [*entries, *others], how)
    return Dataset(
        samples,
        held_out,
        parts,
        stats_of(samples),
        stats_of(held_out),
        account,
        config.max_length,
        tuple(
            (entry.entry.path, stats_of(samples[start:stop]))
            for entry, (start, stop, _) in zip(entries, parts, strict=True)
        )
        if len(entries) > 1
        else (),
        tuple((each.entry.path, each.account.shape) for each in (*entries, *others)),
    )


def _open_cache(
    config: TrainConfig, environment: Mapping[str, str] | None, account: Account
) -> TokenCache | None:
    """The cache, or None where there is none to be had: then tokens are made anew each time."""
    given = config.dataset_prepared_path
    folder = Path(given).expanduser() if given else default_folder(environment or {})
    if folder is None:
        return None
    try:
        return TokenCache(folder)
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        if given:
            raise DataError(
                f"dataset_prepared_path: cannot be written: {given}: {why}"
                "\nhint: dataset_prepared_path=FOLDER, or leave it out"
            ) from problem
        account.notes.append(f"tokens are not kept: {folder}: {why}")
        return None


def _load(entries: Sequence[DatasetEntry], how: Tokenizing, account: Account) -> list[EntrySamples]:
    """The samples of the entries. Raises DataError if they would teach next to nothing."""
    loaded = [samples_of(entry, how) for entry in entries]
    here = Account()
    for entry in loaded:
        here.add(entry.account)
    account.add(here)
    if here.lost > _MOST * (here.rows + here.split) or not any(len(entry.part) for entry in loaded):
        paths = ", ".join(entry.path for entry in entries)
        raise DataError(
            f"nothing to train on: of {here.rows:,} rows of {paths} {here.lost:,} have no trained "
            f"token within max_length {how.config.max_length:,} and {here.dropped:,} are longer "
            "than it\nhint: a larger max_length, or look at the shape of the rows"
        )
    return loaded


def _parts(
    entries: Sequence[EntrySamples], train: NDArray[np.int64] | None
) -> tuple[tuple[int, int, float], ...]:
    """Where the samples of each entry are, once those held out are gone."""
    ends = np.cumsum([0, *(len(entry.part) for entry in entries)])
    if train is not None:
        ends = np.searchsorted(train, ends)
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), entries, strict=True)
    return tuple((start, stop, entry.entry.weight) for start, stop, entry in bounds)


def _note_shared(account: Account, samples: Samples, held_out: Samples) -> None:
    """Say how much of the evaluation tells nothing, since it is trained on as well."""
    count = int(np.isin(held_out.marks(), samples.marks()).sum())
    if count:
        account.notes.append(
            f"warning: {count:,} of {len(held_out):,} samples to evaluate on are trained on too, "
            "token by token: eval_loss is lower than it would be"
        )


def _add_notes(account: Account, entries: Sequence[EntrySamples], how: Tokenizing) -> None:
    for entry in entries:
        found = entry.account
        if found.unused:
            account.notes.append(
                f"{entry.entry.path}: {found.shape}; columns not used: {_some(found.unused)}"
            )
    if how.cache is not None:
        kept = sum(entry.was_kept for entry in entries)
        all_kept = "found as they were kept" if kept == len(entries) else "kept"
        account.notes.append(f"tokens: {all_kept} in {how.cache.folder}")
    if not how.tokenizer.chat_template and not how.config.train_on_prompt:
        account.notes.append(
            "no chat template: a question and its answer are joined with a line break, "
            "other prompts as they stand"
        )
    if account.num_skipped and how.folder is not None:
        account.notes.append(f"skipped rows are in {_write_rejected(entries, how.folder)}")
    elif how.folder is not None:
        (how.folder / REJECTED).unlink(missing_ok=True)  # of an earlier run


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(name[:40] for name in names[:20]) + more


def _write_rejected(entries: Sequence[EntrySamples], folder: Path) -> Path:
    """Put the rows that were skipped into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REJECTED
    with path.open("wb") as target:
        for entry in entries:
            source = entry.rejected
            if isinstance(source, Path):
                with contextlib.suppress(FileNotFoundError), source.open("rb") as file:
                    shutil.copyfileobj(file, target)
            elif source is not None:
                source.seek(0)
                shutil.copyfileobj(source, target)
                source.close()
    return path


def split_rows(
    rows: NDArray[np.int64], config: TrainConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which samples are trained on and which are held out, drawn by the data's seed; both rise.

    Of a row that gave several samples (``rows``: that of each) all are held out or none: they hold
    the same text.
    """
    count = int(rows[-1]) + 1 if len(rows) else 0
    size = config.val_size or 0
    wanted = max(1, round(size * count)) if size < 1 else int(size)
    if wanted >= count:
        way_out = "val_size=0.1" if count > 1 and size >= 1 else "leave val_size out"
        raise DataError(
            f"val_size: {size:g} leaves nothing to train on: there are {count:,} samples"
            f"\nhint: {way_out}, or eval_dataset=FILE"
        )
    seed = config.seed if config.data_seed is None else config.data_seed
    drawn = random.Random(f"{seed}/held out").sample(range(count), wanted)
    is_drawn = np.zeros(count, dtype=bool)
    is_drawn[drawn] = True
    is_held_out = is_drawn[rows]
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
