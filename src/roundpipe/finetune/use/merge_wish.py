"""What a command line asks of merging: where to, in which dtype, into which base."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from roundpipe.finetune.use.request import Request
    from roundpipe.finetune.use.subject import Subject

MERGE_FILE = "roundpipe_merge.json"
MERGE_FORMAT = "roundpipe merge 1"


@dataclass(frozen=True)
class MergeWish:
    """How a subject is to be merged.

    ``dtype``: what is saved; None: as the base was stored. ``is_original``: what was trained over 4
    bits becomes part of the weights from before they were packed.
    """

    folder: Path
    shown: str
    dtype: str | None = None
    is_original: bool = False


def merge_wish_of(request: Request, subject: Subject) -> MergeWish:
    """What a command line asks of merging; raises ConfigError."""
    base = request.options.get("base", "dequantized")
    if base not in ("dequantized", "original"):
        raise ConfigError(f"base: {base} is not dequantized or original\nhint: base=original")
    dtype = request.settings.dtype if "dtype" in request.said else None
    dtype = None if dtype == "auto" else dtype
    if subject.adapter is None and dtype is None:
        raise ConfigError(
            f"a whole model already, with nothing to merge: {request.given}\n"
            "hint: use it as it is; dtype=bf16 writes a copy of it in bf16"
        )
    is_packed = request.settings.finetuning_type == "qlora"
    if base == "original" and not is_packed:
        raise ConfigError(
            f"base=original is of adapters that were trained over 4 bits: {request.given}\n"
            "hint: leave it out"
        )
    shown = _place(request, subject)
    folder = Path(shown).expanduser().resolve()  # a link stays one, and what it leads to is filled
    require_free(folder, shown)
    return MergeWish(folder, shown, dtype, is_original=base == "original")


def _place(request: Request, subject: Subject) -> str:
    """Where the merged model goes if nothing is said: into the run, else beside what was given."""
    if "output_dir" in request.said:
        return request.settings.output_dir
    said = request.options.get("export_dir")
    if said:
        return str(said)
    given = Path(request.given)
    if not given.expanduser().is_dir():
        name = request.given.rstrip("/").rpartition("/")[2].partition("@")[0]
        return f"{Path(name).stem if name.endswith('.gguf') else name}-merged"
    if subject.run is not None and subject.folder == given.expanduser() != subject.run:
        return f"{str(given).rstrip('/')}-merged"
    return str(given / "merged")


def require_free(folder: Path, shown: str) -> None:
    """Raise ConfigError where something lies that no merge has written."""
    if not folder.exists():
        return
    if folder.is_dir():
        files = {path.name for path in folder.iterdir()}
        files -= _written_by_merge(folder)
        if not files:
            return
        raise ConfigError(
            f"output_dir: not empty, and not of an earlier merge: {shown} has {min(files)}\n"
            f"hint: output_dir={shown.rstrip('/')}-merged"
        )
    raise ConfigError(f"output_dir: not a folder: {shown}\nhint: output_dir=merged")


def _written_by_merge(folder: Path) -> set[str]:
    """The names of files in a folder that an earlier merge says are its own."""
    try:
        told = json.loads((folder / MERGE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    if not isinstance(told, dict) or told.get("format") != MERGE_FORMAT:
        return set()
    files = told.get("files")
    return {MERGE_FILE, *map(str, files)} if isinstance(files, list) else set()
