"""What the README of a dataset's folder says of its files, in the way of the hub.

A copy of a dataset of the hub may hold several datasets ("configurations"), which must not be read
as one. The head of its README, between two lines of ---, lists them:

    configs:
    - config_name: main
      data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roundpipe.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Listed:
    """Where to look: ``folder``, and in it what matches the ``patterns``; None: its splits."""

    folder: Path
    patterns: list[str] | None = None


def listed(folder: Path, name: str | None, splits: Sequence[str]) -> Listed:
    """The files of the configuration ``name`` of a folder. Raises DataError."""
    configs = _configs(folder)
    if not configs:
        if name is None:
            return Listed(folder)
        if (folder / name).is_dir() and ".." not in Path(name).parts:
            return Listed(folder / name)
        raise DataError(
            f"no configuration {name} in the folder: {folder}\nhint: leave out name, or data_files"
        )
    config = _chosen(configs, name, folder)
    inside = folder / str(config.get("data_dir") or "")
    if not inside.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"data_dir outside of the folder: {folder / 'README.md'}: {config['data_dir']}"
            f"\nhint: dataset='{{path: {folder}, data_files: \"*\"}}'"
        )
    files = config.get("data_files")
    if files is None:
        return Listed(inside)
    by_split = _by_split(files)
    missing = [split for split in splits if split not in by_split]
    if missing:
        known = list(by_split)
        raise DataError(
            f"no split {missing[0]} in the folder: {folder}; there are: {', '.join(known)}"
            f"\nhint: dataset='{{path: {folder}, split: {known[0] if known else 'train'}}}'"
        )
    return Listed(inside, [pattern for split in splits for pattern in by_split[split]])


def _configs(folder: Path) -> list[dict[str, Any]]:
    """The configurations that the README lists; none where it has none that can be read."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return []
    if not text.startswith("---"):
        return []
    try:
        head = yaml.safe_load(text[3:].partition("\n---")[0])
    except yaml.YAMLError:
        return []
    configs = head.get("configs") if isinstance(head, dict) else None
    if not isinstance(configs, list):
        return []
    return [config for config in configs if isinstance(config, dict) and "config_name" in config]


def _chosen(configs: list[dict[str, Any]], name: str | None, folder: Path) -> dict[str, Any]:
    names = [str(config["config_name"]) for config in configs]
    for config in configs:
        is_default = config.get("default") is True or config["config_name"] == "default"
        if str(config["config_name"]) == name or (name is None and (is_default or len(names) == 1)):
            return config
    what = "several configurations" if name is None else f"no configuration {name}"
    raise DataError(
        f"{what} in the folder: {folder}; there are: {', '.join(names)}"
        f"\nhint: dataset='{{path: {folder}, name: {names[0]}}}'"
    )


def _by_split(files: Any) -> dict[str, list[str]]:
    """Patterns by split: the hub writes them in four ways."""
    if isinstance(files, dict):
        return {str(split): _as_patterns(paths) for split, paths in files.items()}
    found: dict[str, list[str]] = {}
    for item in _as_list(files):
        if isinstance(item, dict):
            found.setdefault(str(item.get("split", "train")), []).extend(
                _as_patterns(item.get("path"))
            )
        else:
            found.setdefault("train", []).append(str(item))
    return found


def _as_patterns(value: Any) -> list[str]:
    return [str(pattern) for pattern in _as_list(value) if pattern]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
