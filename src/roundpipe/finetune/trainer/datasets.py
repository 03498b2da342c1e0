"""A Trainer's datasets as the samples of a run: tokenised, masked, cut, in the order of the rows.

Tokens go to files without a name, so that data may be larger than memory. Only rows that a collator
of the user's takes as they are stay where they were. A stream is read as far as ``max_steps`` needs
and trained in its order, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.account import Account, stats_of
from roundpipe.finetune.data.dataset import Dataset, load_dataset, split_rows
from roundpipe.finetune.data.order import Order
from roundpipe.finetune.data.samples import Samples
from roundpipe.finetune.data.template import use_chat_template, use_special_tokens
from roundpipe.finetune.output.earlier import uncounted
from roundpipe.finetune.trainer.collating import CollatorBatches
from roundpipe.finetune.trainer.row_samples import RowSamples
from roundpipe.finetune.trainer.rows import is_stream, is_transformed, num_rows, rows_of
from roundpipe.finetune.trainer.sft_rows import RowReader
from roundpipe.finetune.trainer.told import IN_MEMORY, NO_LIMIT
from roundpipe.finetune.trainer.write_samples import Enough, Written, write_samples

if TYPE_CHECKING:
    from roundpipe.finetune.data.packing import Packing
    from roundpipe.finetune.output.earlier import Counting
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.trainer.told import Told


@dataclass(frozen=True)
class Data:
    """What is trained and evaluated on. ``config`` is final, whatever rows decide of it included.

    ``evals``: samples by the name of their dataset, ``""`` where there is one without a name.
    ``collating``: what makes batches of samples, None where a run's own way does.
    """

    config: TrainConfig
    dataset: Dataset
    evals: dict[str, Any]
    order: Order
    collating: CollatorBatches | None


@dataclass(frozen=True)
class Preparing:
    """Makes samples as a Trainer's arguments and tokenizer have them.

    Sets the tokenizer's template and end token if the arguments name one. ``counting(what, total)``
    gives a context whose function shows how many rows are done. Raises ConfigError for settings
    that cannot be meant together.
    """

    told: Told
    tokenizer: Any
    formatting_func: Callable[[dict[str, Any]], Any] | None = None
    data_collator: Callable[[list[dict[str, Any]]], Any] | None = None
    counting: Counting = uncounted
    environment: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        config = self.told.config
        use_special_tokens(self.tokenizer, config.special_tokens)
        use_chat_template(self.tokenizer, config.chat_template)
        if self.data_collator is not None and config.packing:
            raise ConfigError(
                "packing makes its batches itself, and there is a data_collator"
                "\nhint: packing=False, or leave data_collator out"
            )

    def data(self, train_dataset: Any, eval_dataset: Any = None) -> Data:
        """All samples; blocks until they are there.

        None for ``train_dataset``: what the arguments name. Raises ConfigError and DataError for
        rows that cannot be used, naming the row.
        """
        account = Account()
        config = self.told.config
        if train_dataset is None and config.dataset[0].path == IN_MEMORY:
            raise ConfigError(
                "train_dataset is not given, and args name none\nhint: train_dataset=DATASET; "
                "to evaluate alone: train_dataset=eval_dataset, and evaluate() without train()"
            )
        if train_dataset is None:
            dataset = load_dataset(
                config, self.tokenizer, counting=self.counting, environment=self.environment
            )
            evals = self._evals(eval_dataset, account)
            evals = evals or ({"": dataset.eval_samples} if dataset.eval_samples else {})
            order = self._whole(Order.of(config, dataset), config)
            return Data(config, dataset, evals, order, self._collating())
        samples, reader, packing = self._train(train_dataset, account)
        if not len(samples):
            raise _nothing(account, config)
        evals = self._evals(eval_dataset, account)
        if config.val_size is not None and isinstance(samples, Samples):
            train, chosen = split_rows(samples.rows(), config)
            samples, evals = samples.take(train), {"": samples.take(chosen)}
        config = _final(config, reader, samples, evals, packing)
        if is_stream(train_dataset):
            config = config.model_copy(update={"train_sampling_strategy": "sequential"})
        dataset = _dataset(samples, evals, account, config)
        order = Order.of(config, dataset) if packing is None else Order.packed(config, packing)
        order = order if is_stream(train_dataset) else self._whole(order, config)
        return Data(config, dataset, evals, order, self._collating())

    def _whole(self, order: Order, config: TrainConfig) -> Order:
        """The order without the short last batch of an epoch, where args say so."""
        arguments = self.told.arguments
        if not self.told.is_theirs or not arguments.dataloader_drop_last:
            return order
        return order.in_whole(max(1, config.batch_size // arguments.gradient_accumulation_steps))

    def evaluation(self, eval_dataset: Any) -> dict[str, Any]:
        """Samples of datasets to evaluate on, by name, ``""`` for one without."""
        return self._evals(eval_dataset, Account())

    def _collating(self) -> CollatorBatches | None:
        return None if self.data_collator is None else CollatorBatches(self.data_collator)

    def _train(
        self, dataset: Any, account: Account
    ) -> tuple[Any, RowReader | None, Packing | None]:
        config = self.told.config
        enough = Enough()
        if is_stream(dataset):
            if config.max_steps is None:
                raise ConfigError(
                    "train_dataset is a stream, of which nobody knows how long it is"
                    "\nhint: max_steps=1000, or a dataset with a length"
                )
            wanted = config.max_steps * config.batch_size
            is_packed = config.packing
            enough = Enough(
                samples=None if is_packed else wanted,
                tokens=wanted * config.max_length if is_packed else None,
            )
        samples, reader, packing = self._samples(dataset, "train_dataset", account, enough)
        return samples, reader, packing

    def _evals(self, given: Any, account: Account) -> dict[str, Any]:
        if given is None:
            return {}
        by_name = dict(given) if isinstance(given, Mapping) else {"": given}
        for name, dataset in by_name.items():
            if isinstance(dataset, list) and isinstance(given, Mapping) and not _has_rows(dataset):
                raise ConfigError(
                    f"eval_dataset is a dict of columns\nhint: eval_dataset="
                    f"datasets.Dataset.from_dict(columns), or a dict of datasets: {name} is none"
                )
        found = {}
        for name, dataset in by_name.items():
            shown = f"eval_dataset[{name!r}]" if name else "eval_dataset"
            here = Account()
            samples, _, _ = self._samples(dataset, shown, here, Enough())
            if not len(samples):
                raise _nothing(here, self.told.config, shown)
            account.add(here)
            found[str(name)] = samples
        return found

    def _samples(
        self, dataset: Any, name: str, account: Account, enough: Enough
    ) -> tuple[Any, RowReader | None, Packing | None]:
        rows = rows_of(dataset, name)
        first = next(rows, None)
        if first is None:
            raise DataError(f"{name} has no rows\nhint: a dataset with rows")
        if self._are_features(first):
            kept = self._kept(dataset, name, enough)
            account.rows += num_rows(kept) or 0
            removes = self.told.preparation.removes_columns
            return RowSamples(kept, removes_columns=removes), None, None
        if is_transformed(dataset):
            raise ConfigError(
                f"{name} changes its rows each time they are read (with_transform), and is "
                "tokenised once\nhint: dataset.map(function), or a data_collator and "
                "dataset_kwargs={'skip_prepare_dataset': True}"
            )
        preparation, config = self.told.preparation, self.told.config
        reader = RowReader.of(first, config, preparation, self.tokenizer, self.formatting_func)
        account.shape = reader.shape
        total = num_rows(dataset) or 0
        with self.counting(f"tokenising {name}", total) as show:
            written: Written = write_samples(
                chain([first], rows),
                reader,
                name=name,
                account=account,
                enough=enough,
                show=show,
            )
        return Samples([written.part]), reader, written.packing

    def _are_features(self, row: Mapping[str, Any]) -> bool:
        """Whether the user's collator takes rows as they are."""
        how = self.told.preparation
        if self.data_collator is None:
            if how.takes_as_is and "input_ids" not in row:
                raise ConfigError(
                    "skip_prepare_dataset, but the rows have no input_ids"
                    "\nhint: leave it out, or a data_collator that makes them"
                )
            return False
        keeps_all = how.is_theirs and not how.cuts_tokens and not how.removes_columns
        return how.takes_as_is or "input_ids" in row or keeps_all

    def _kept(self, dataset: Any, name: str, enough: Enough) -> Any:
        """The dataset itself, or as much of a stream as is needed."""
        if isinstance(dataset, str) or is_stream(dataset):
            return list(islice(rows_of(dataset, name), enough.samples))
        return dataset


def _has_rows(rows: list[Any]) -> bool:
    return not rows or isinstance(rows[0], Mapping)


def _final(
    config: TrainConfig,
    reader: RowReader | None,
    samples: Any,
    evals: Mapping[str, Any],
    packing: Packing | None,
) -> TrainConfig:
    """The config with what the rows decided."""
    changes: dict[str, Any] = {}
    if reader is not None:
        changes["train_on_prompt"] = reader.config.train_on_prompt
    longest = max(int(each.lengths.max(initial=2)) for each in (samples, *evals.values()))
    if packing is not None:
        changes["packing"] = True
        longest = max(longest, int(packing.tokens.max()))
    is_wrapped = reader is not None and config.packing and _wraps(reader)
    if is_wrapped:  # its rows are full, and read end to end
        changes["packing"] = False
    if config.max_length == NO_LIMIT or longest > config.max_length:
        changes["max_length"] = longest
    return config.model_copy(update=changes) if changes else config


def _wraps(reader: RowReader) -> bool:
    return reader.how.is_theirs and reader.how.packing_strategy == "wrapped"


def _dataset(
    samples: Any, evals: Mapping[str, Any], account: Account, config: TrainConfig
) -> Dataset:
    held_out = _joined(evals)
    return Dataset(
        samples=samples,
        eval_samples=held_out,
        parts=((0, len(samples), 1.0),),
        stats=stats_of(samples),
        eval_stats=stats_of(held_out),
        account=account,
        limit=config.max_length,
    )


def _joined(evals: Mapping[str, Any]) -> Any:
    """Samples of all datasets to evaluate on, end to end."""
    found = list(evals.values())
    if not found:
        return Samples()
    if len(found) == 1:
        return found[0]
    if all(isinstance(each, Samples) for each in found):
        return Samples.joined(found)
    rows = [row for each in found for row in each]
    return RowSamples(rows, removes_columns=False)


def _nothing(account: Account, config: TrainConfig, name: str = "train_dataset") -> DataError:
    return DataError(
        f"no row of {name} can be used: of {account.rows:,} rows {account.lost:,} have no trained "
        f"token within max_length {config.max_length:,}, {account.dropped:,} are longer, and "
        f"{account.num_skipped:,} could not be read\nhint: a larger max_length, or look at the rows"
    )
