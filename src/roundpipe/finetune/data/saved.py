"""Folders that ``Dataset.save_to_disk`` of the `datasets` library wrote: which files, in order.

The library itself is not needed for that: the folder lists its files in JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


def saved_files(folder: Path, splits: Sequence[str]) -> list[Path]:
    """The Arrow files of the ``splits`` of a saved dataset. Raises DataError."""
    if not (folder / "dataset_dict.json").is_file():
        return _listed(folder)
    known = _read(folder / "dataset_dict.json").get("splits") or []
    for split in splits:
        if split not in known:
            raise DataError(
                f"no split {split} in the folder: {folder}; there are: {', '.join(known)}"
                f"\nhint: dataset='{{path: {folder}, split: {known[0] if known else 'train'}}}'"
            )
    return [file for split in splits for file in _listed(folder / split)]


def _listed(folder: Path) -> list[Path]:
    state = _read(folder / "state.json")
    try:
        names = [Path(str(file["filename"])).name for file in state["_data_files"]]
    except (KeyError, TypeError) as problem:
        raise _broken(folder / "state.json") from problem
    for name in names:
        if not (folder / name).is_file():
            raise DataError(
                f"a file of the dataset is missing: {folder / name}"
                "\nhint: copy the whole folder again"
            )
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise _broken(path) from problem
    if not isinstance(value, dict):
        raise _broken(path)
    return value


def _broken(path: Path) -> DataError:
    return DataError(
        f"not what save_to_disk writes: {path}\nhint: save or copy the dataset's folder again"
    )
