"""The checkpoints of one run: folders ``checkpoint-N`` side by side, N optimizer steps each."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from roundpipe.checkpoint.manifest import MANIFEST, Manifest, check, files_in, read_manifest
from roundpipe.durable import clear_leftovers, remove_folder
from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = [
    "check",
    "checkpoints_in",
    "drop_old",
    "manifest_of",
    "name_of",
    "newest_whole",
    "require_replaceable",
]

_NAME = re.compile(r"checkpoint-(0|[1-9]\d{0,14})")


def name_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"checkpoint-{step}"


def checkpoints_in(parent: Path) -> list[Path]:
    """The folders that are called like checkpoints, whole or not, in order of steps."""
    if not parent.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in parent.iterdir()]
    found = [(int(name[1]), path) for name, path in named if name and _is_own(path)]
    return [path for _, path in sorted(found)]


def manifest_of(folder: Path) -> Manifest:
    """What a checkpoint says of itself, its files unchecked; raises ConfigError."""
    return read_manifest(folder)


def newest_whole(parent: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in ``parent`` that is whole, and why newer ones are not.

    Reads all of it. What a dead process has left half written is removed before. Raises OSError.
    """
    reasons: list[str] = []
    if parent.is_dir():
        clear_leftovers(parent)
    for path in reversed(checkpoints_in(parent)):
        try:
            check(path)
        except ConfigError as error:
            reasons.append(str(error).partition("\n")[0])
        else:
            return path, reasons
    return None, reasons


def require_replaceable(folder: Path) -> None:
    """Raise ConfigError if a checkpoint of this name would take the place of something else."""
    if not folder.exists() or _NAME.fullmatch(folder.name):
        return
    if not folder.is_dir():
        raise ConfigError(f"not a folder: {folder}\nhint: {folder.name}-1")
    present = set(files_in(folder))
    with contextlib.suppress(ConfigError):  # it is no checkpoint
        present -= {MANIFEST, *read_manifest(folder).files}
    if present:
        raise ConfigError(
            f"a checkpoint would take the place of other files: {folder}: {min(present)}\n"
            f"hint: {folder / name_of(1)}"
        )


def drop_old(
    parent: Path, keep: int, never: Collection[Path] = (), *, up_to: int | None = None
) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints, oldest first; returns what is gone.

    Those in ``never`` stay, and the newest whole one in any case, whatever is newer. To be called
    when a new one is whole. ``up_to``: its step; what is there of later steps was left out when the
    run went on, will be written again, and neither counts nor goes. Raises OSError.
    """
    assert keep >= 1, f"nothing would be left: {keep}"
    clear_leftovers(parent)
    present = [p for p in checkpoints_in(parent) if up_to is None or _step_of(p) <= up_to]
    kept = present[-keep:]
    stays = {path.resolve() for path in (*kept, *never)}
    if not any(map(_looks_whole, kept)):
        stays |= {path.resolve() for path in [*filter(_looks_whole, present)][-1:]}
    dropped = [path for path in present if path.resolve() not in stays]
    for path in dropped:
        remove_folder(path)
    return dropped


def _looks_whole(folder: Path) -> bool:
    try:
        check(folder, by_size=True)
    except (ConfigError, OSError):
        return False
    return True


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _is_own(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
