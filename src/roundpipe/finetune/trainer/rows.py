"""Rows of whatever a Trainer is given as a dataset: plain values, one dict a row.

datasets.Dataset, a list of dicts, torch's map-style Dataset     have a length
datasets.IterableDataset, torch's IterableDataset, a generator   are read as far as needed
a path or a hub id                                               as the key ``dataset`` reads it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.rows import read_rows

_WAYS = "datasets.Dataset.from_list(rows), a list of dicts, or a path"


def rows_of(dataset: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``dataset``, which ``name`` (an argument's) calls by in errors.

    Tensors and arrays become lists of numbers. Raises ConfigError for what holds no rows.
    """
    for number, row in enumerate(_each(dataset, name), 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name}: row {number} is a {type(row).__name__}, not a dict\nhint: {name}={_WAYS}"
            )
        yield {str(column): _plain(value) for column, value in row.items()}


def num_rows(dataset: Any) -> int | None:
    """How many rows there are, None where only reading tells."""
    if isinstance(dataset, str):
        return None
    try:
        return len(dataset)
    except TypeError:  # torch's and datasets' streams raise it too, where they have a __len__
        return None


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from its beginning, perhaps without end."""
    is_iterable = isinstance(dataset, Iterable) and not isinstance(dataset, str)
    return is_iterable and num_rows(dataset) is None


def is_transformed(dataset: Any) -> bool:
    """Whether rows pass through a function each time they are read (``with_transform``)."""
    form = getattr(dataset, "format", None)
    return isinstance(form, dict) and form.get("type") == "custom"


def row_at(dataset: Any, index: int) -> dict[str, Any]:
    """Row ``index`` as the dataset itself gives it."""
    found: Mapping[str, Any] = dataset[index]
    return dict(found)


def _each(dataset: Any, name: str) -> Iterable[Any]:
    if isinstance(dataset, str):
        return (row.values for row in read_rows(dataset))
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__} of {', '.join(map(str, list(dataset)[:5]))}"
            f"\nhint: {name}={_way_out_of_mapping(dataset)}"
        )
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):
        return _untyped(dataset)
    if hasattr(dataset, "__getitem__") and (count := num_rows(dataset)) is not None:
        return (dataset[i] for i in range(count))
    if not isinstance(dataset, Iterable):
        raise ConfigError(f"{name} is a {type(dataset).__name__}\nhint: {name}={_WAYS}")
    return dataset


def _untyped(dataset: Any) -> Iterable[Any]:
    """A dataset of ``datasets`` that gives Python's values, its transform kept if it has one."""
    is_plain = is_transformed(dataset) or is_stream(dataset)
    rows: Iterable[Any] = dataset if is_plain else dataset.with_format(None)
    return rows


def _way_out_of_mapping(dataset: Mapping[Any, Any]) -> str:
    first = next(iter(dataset), "train")
    is_columns = isinstance(dataset.get(first), list | tuple)
    return "datasets.Dataset.from_dict(columns)" if is_columns else f"dataset[{str(first)!r}]"


def _plain(value: Any) -> Any:
    """Python's values for a tensor's, an array's, and those inside of lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and value and hasattr(value[0], "tolist"):
        return [_plain(each) for each in value]
    return list(value) if isinstance(value, tuple) else value
