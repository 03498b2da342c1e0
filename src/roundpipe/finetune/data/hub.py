"""Datasets of the hub, through the `datasets` library; none of their own code is ever run.

The library downloads what it lacks and keeps it, as Arrow files, where its own settings say
(HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN are its). What it raises is put into words here,
each with one way out.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError
from roundpipe.finetune.data.table_rows import ROWS, batch_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.finetune.data.problems import Report, Row
    from roundpipe.finetune.settings.entry import DatasetEntry


@dataclass(frozen=True)
class HubRows:
    """The rows of a dataset that the library has loaded."""

    dataset: Any
    name: str

    @property
    def paths(self) -> list[Path]:
        """The Arrow files that it is read from."""
        return [Path(str(file["filename"])) for file in self.dataset.cache_files]

    @property
    def manner(self) -> Any:
        """Which rows of these files: the split's size and, of a part of one, its place."""
        return [len(self.dataset), str(self.dataset.split), str(self.dataset.info.config_name)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the Arrow files."""
        return sum(path.stat().st_size for path in self.paths)

    def rows(self, report: Report, show: Callable[[int], None]) -> Iterator[Row]:
        """All rows; a table has none that cannot be read."""
        return batch_rows(self._batches(show), self.name)

    def count(self) -> int:
        """How many rows those are."""
        return len(self.dataset)

    def _batches(self, show: Callable[[int], None]) -> Iterator[Any]:
        total, size, done = max(1, len(self.dataset)), self.num_bytes, 0
        for batch in self.dataset.with_format("arrow").iter(batch_size=ROWS):
            yield batch
            done += batch.num_rows
            show(size * done // total)


def load_from_hub(entry: DatasetEntry) -> Any:
    """The dataset as the library gives it. Raises DataError."""
    try:
        datasets = importlib.import_module("datasets")  # takes two seconds
    except ImportError as problem:
        raise DataError(
            f"the datasets library is needed to read from the hub: {entry.path}"
            "\nhint: pip install datasets"
        ) from problem
    try:
        return datasets.load_dataset(
            entry.path,
            entry.name,
            split=entry.split or "train",
            data_files=list(entry.data_files) if entry.data_files else None,
            revision=entry.revision,
        )
    except Exception as problem:  # the library raises a dozen kinds of its own and of others
        raise _explained(entry, problem) from problem


def _explained(entry: DatasetEntry, problem: Exception) -> Exception:
    """The problem in our words, or itself where it is none of the known."""
    chain = list(_causes(problem))
    kinds = {kind.__name__ for error in chain for kind in type(error).__mro__}
    text = " ".join(" ".join(str(error).split()) for error in chain)
    for matches, explain in _RULES:
        if matches(kinds, text):
            what, hint = explain(entry, text)
            return DataError(f"{what}\nhint: {hint}")
    if isinstance(problem, (ValueError, OSError, RuntimeError)) or "DatasetsError" in kinds:
        why = " ".join(str(problem).split())[:200] or type(problem).__name__
        return DataError(
            f"cannot load the dataset {entry.path}: {why}"
            "\nhint: download its files and give their folder: dataset=FOLDER"
        )
    return problem


def _causes(problem: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        seen.add(id(problem))
        yield problem
        problem = problem.__cause__ or problem.__context__


def _listed(text: str) -> str:
    """The names that the library lists in brackets, and the first of them."""
    found = re.search(r"\[([^\[\]]+)\]", text)
    return ", ".join(re.findall(r"'([^']+)'", found[1])[:12]) if found else ""


def _gated(entry: DatasetEntry, text: str) -> tuple[str, str]:
    return (
        f"access to the dataset must be asked for: {entry.path}",
        f"accept its terms at huggingface.co/datasets/{entry.path}, then `hf auth login`",
    )


def _configurations(entry: DatasetEntry, text: str) -> tuple[str, str]:
    names = _listed(text)
    first = names.partition(",")[0] or "NAME"
    asked = f"no configuration {entry.name}" if entry.name else "several configurations"
    return (
        f"the dataset {entry.path} has {asked}; there are: {names}",
        f"dataset='{{path: {entry.path}, name: {first}}}'",
    )


def _splits(entry: DatasetEntry, text: str) -> tuple[str, str]:
    names = _listed(text)
    first = names.partition(",")[0] or "test"
    return (
        f"the dataset {entry.path} has no split {entry.split or 'train'}; there are: {names}",
        f"dataset='{{path: {entry.path}, split: {first}}}'",
    )


def _code(entry: DatasetEntry, text: str) -> tuple[str, str]:
    return (
        f"the dataset {entry.path} is made by code of its own, which is never run",
        f"revision: refs/convert/parquet beside path: {entry.path}, or its files in a folder",
    )


def _offline(entry: DatasetEntry, text: str) -> tuple[str, str]:
    return (
        f"offline, and the dataset is not kept on this machine: {entry.path}",
        "unset HF_HUB_OFFLINE, or give files of your own: dataset=FILE.jsonl",
    )


def _unreachable(entry: DatasetEntry, text: str) -> tuple[str, str]:
    return (
        f"the hub cannot be reached, and the dataset is not kept on this machine: {entry.path}",
        "check the network or HF_ENDPOINT, or give files of your own: dataset=FILE.jsonl",
    )


def _missing(entry: DatasetEntry, text: str) -> tuple[str, str]:
    if entry.revision and "evision" in text:
        return (
            f"the dataset {entry.path} has no revision {entry.revision}",
            "leave out revision, or give a branch, tag or commit",
        )
    return (
        f"no such dataset, neither a file here nor on the hub: {entry.path}",
        "check the name; a private one needs `hf auth login`",
    )


def _empty(entry: DatasetEntry, text: str) -> tuple[str, str]:
    named = f" that match {', '.join(entry.data_files)}" if entry.data_files else ""
    return (
        f"the dataset {entry.path} has no data files{named}",
        "look at its files on the hub and name them: data_files: …",
    )


def _uneven(entry: DatasetEntry, text: str) -> tuple[str, str]:
    return (
        f"the files of the dataset {entry.path} do not have the same columns",
        f"dataset='{{path: {entry.path}, data_files: ONE_OF_THEM}}'",
    )


_RULES: tuple[tuple[Callable[[set[str], str], bool], Callable[..., tuple[str, str]]], ...] = (
    (lambda kinds, text: "GatedRepoError" in kinds or "is a gated dataset" in text, _gated),
    (lambda kinds, text: "Dataset scripts are no longer" in text, _code),
    (lambda kinds, text: "Config name is missing" in text, _configurations),
    (lambda kinds, text: "BuilderConfig" in text and "not found" in text, _configurations),
    (lambda kinds, text: "Unknown split" in text, _splits),
    (
        lambda kinds, text: "OfflineModeIsEnabled" in kinds or "OfflineModeIsEnabled" in text,
        _offline,
    ),
    (lambda kinds, text: bool(kinds & {"EmptyDatasetError", "DataFilesNotFoundError"}), _empty),
    (lambda kinds, text: "DatasetGenerationCastError" in kinds, _uneven),
    (
        lambda kinds, text: bool(kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}),
        _missing,
    ),
    (
        lambda kinds, text: (
            bool(kinds & {"ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout"})
            or "Couldn't reach" in text
        ),
        _unreachable,
    ),
    (lambda kinds, text: "DatasetNotFoundError" in kinds, _missing),
)
