"""Tokens that are kept: the second start of a run tokenises nothing.

    FOLDER/
      <key>/            input_ids.bin labels.bin starts.bin … (`tokens.py`)
                        rejected.jsonl    rows that were skipped
                        about.json        sizes, SHA-256, the account of the rows
      .making-…/        an entry that a live process writes; renamed when it is whole
      digests/          SHA-256 of data files by path, size, time and inode, so that they are not
                        read through again

Rules
1. A key says everything that tokens hang on: the content of the files and of the tokenizer, the
   settings that matter, the versions, and this room's own code. So an entry never has to be judged
   old, and editing a file or a template makes another one. Nothing is ever removed but what is
   broken: delete the folder, or parts of it, at will.
2. An entry is whole or absent. Sizes are compared whenever one is opened; the SHA-256 too where it
   is small, or where the files' times say that they were copied or touched since.
3. Two processes that make the same entry do not meet before the rename, and the second one's is
   thrown away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.durable import sync, write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.data.samples import ARRAYS, Part
from roundpipe.finetune.data.tokens import TokenWriter, map_folder
from roundpipe.store.folder_lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

REJECTED = "rejected.jsonl"
_ABOUT = "about.json"
_FORMAT = 1
_MAKING = ".making-"
_ALWAYS_CHECKED = 1 << 26  # bytes: a twentieth of a second
_LEFT_BEHIND = 600.0  # seconds without a write after which a writer is looked for
_SETTLED = 2.0  # seconds: a file that changed later than that before may change in the same tick


@dataclass(frozen=True)
class Kept:
    """An entry of the cache. ``account``: JSON, as it was given when the entry was made."""

    part: Part
    account: dict[str, Any]
    folder: Path

    @property
    def rejected(self) -> Path:
        """The rows that were skipped; there may be none."""
        return self.folder / REJECTED


class TokenCache:
    """The entries in one folder, which is made if need be. Raises OSError if it cannot be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def find(self, key: str) -> Kept | None:
        """The entry of that key, or None; one that is broken is taken away."""
        folder = self.folder / key
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            if about["format"] == _FORMAT and _is_whole(folder, about["files"]):
                hashes = {name: about["files"][f"{name}.bin"]["sha256"] for name in ARRAYS}
                return Kept(map_folder(folder, hashes), dict(about["account"]), folder)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            if not folder.exists():
                return None
            logger.info("tokens are made again: %s: %s", folder, problem)
        shutil.rmtree(folder, ignore_errors=True)
        return None

    @contextlib.contextmanager
    def making(self, key: str) -> Iterator[Making]:
        """Write an entry; it is there when the block ends, and nothing is left if it fails."""
        folder = self.folder / f"{_MAKING}{key[:16]}-{os.getpid()}-{time.monotonic_ns():x}"
        folder.mkdir()
        try:
            with lock_folder(folder, key="dataset_prepared_path"), TokenWriter(folder) as writer:
                making = Making(writer, folder)
                yield making
                _write_about(folder, writer, making.account)
            _rename(folder, self.folder / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def digest_of_file(self, path: Path, show: Callable[[int], None]) -> str:
        """SHA-256 of a file, remembered; ``show`` is told of the bytes read. Raises OSError."""
        path = path.resolve()
        memo = self.folder / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
        before = path.stat()
        now = {
            "bytes": before.st_size,
            "mtime_ns": before.st_mtime_ns,
            "inode": before.st_ino,
        }
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(memo.read_text(encoding="utf-8"))
            if all(known[name] == value for name, value in now.items()):
                return str(known["sha256"])
        digest = _digest(path, show)
        if time.time() - before.st_mtime > _SETTLED:
            with contextlib.suppress(OSError):
                memo.parent.mkdir(exist_ok=True)
                write_text(memo, json.dumps({"path": str(path), **now, "sha256": digest}))
        return digest

    def _sweep(self) -> None:
        """Take away what a process that was killed left behind."""
        for folder in self.folder.glob(f"{_MAKING}*"):
            with contextlib.suppress(OSError, ConfigError):  # gone, or held by who writes it
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if time.time() - newest > _LEFT_BEHIND:
                    with lock_folder(folder, key="dataset_prepared_path"):
                        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Making:
    """An entry that is being written: what goes into it."""

    writer: TokenWriter
    folder: Path
    account: dict[str, Any] | None = None


def default_folder(environment: Mapping[str, str]) -> Path | None:
    """Where tokens are kept if nobody says: below the cache of the user, or beside the hub's."""
    for name, inside in (("XDG_CACHE_HOME", ""), ("HF_HOME", ""), ("LOCALAPPDATA", "")):
        if environment.get(name):
            return Path(environment[name], inside, "roundpipe", "tokens").expanduser()
    home = environment.get("HOME") or environment.get("USERPROFILE")
    return Path(home, ".cache", "roundpipe", "tokens") if home else None


def _is_whole(folder: Path, files: Mapping[str, Any]) -> bool:
    names = {f"{name}.bin" for name in ARRAYS}
    if not names <= set(files):
        return False
    for name, known in files.items():
        found = (folder / name).stat()
        if found.st_size != known["bytes"]:
            return False
        is_small = found.st_size <= _ALWAYS_CHECKED
        if (is_small or found.st_mtime_ns != known["mtime_ns"]) and (
            _digest(folder / name) != known["sha256"]
        ):
            return False
    return True


def _write_about(folder: Path, writer: TokenWriter, account: dict[str, Any] | None) -> None:
    hashes = {f"{name}.bin": found for name, found in writer.finish().items()}
    if (folder / REJECTED).exists():
        hashes[REJECTED] = _digest(folder / REJECTED)
    files = {}
    for name, sha256 in hashes.items():
        sync(folder / name)
        found = (folder / name).stat()
        files[name] = {
            "bytes": found.st_size,
            "sha256": sha256,
            "mtime_ns": found.st_mtime_ns,
        }
    about = {"format": _FORMAT, "files": files, "account": account or {}}
    write_text(folder / _ABOUT, json.dumps(about, indent=1) + "\n")


def _rename(made: Path, final: Path) -> None:
    """Put what was made in place, unless another process was faster."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    else:
        sync(final.parent)


def _digest(path: Path, show: Callable[[int], None] = lambda read: None) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            done += count
            show(done)
    return digest.hexdigest()
