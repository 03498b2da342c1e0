"""What a checkpoint says of itself: every file with its size and SHA-256.

The manifest is written last, so a folder that has one was written to its end; what it says is
checked before anything of the folder is used. Files come from anywhere: names are plain, numbers
are numbers, nothing but regular files within the folder is opened, and none that the manifest does
not know: somebody's notes beside a checkpoint are no reason not to go on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from roundpipe.durable import Fingerprint, fingerprint, write_new
from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Stamp = tuple[int, int, int, int]  # changes whenever somebody writes to a file, or replaces it

MANIFEST = "manifest.json"
FORMAT = "roundpipe checkpoint 1"
_LARGEST = 64 << 20  # bytes of a manifest
_FIELDS = [field.name for field in fields(Fingerprint)]
_READERS = 4  # files that are read at a time
_MOST_FOLDERS = 3  # a file lies in so many at most, below the checkpoint's own


@dataclass(frozen=True)
class Manifest:
    """``step``: optimizer steps made, where somebody said so; ``about``: whatever they said.

    ``stamps``: of files that were found to be as ``files`` says, when that was.
    """

    step: int | None
    about: Mapping[str, Any]
    files: Mapping[str, Fingerprint]
    stamps: Mapping[str, Stamp] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.num_bytes for each in self.files.values())

    def has(self, name: str, said: Fingerprint, stamp: Stamp) -> bool:
        """Whether a file was found to be what is said of it, and is still that very file."""
        return self.files.get(name) == said and self.stamps.get(name) == stamp

    def write(self, folder: Path) -> None:
        """Write it, as the folder's last file, and sync it. Raises OSError."""
        files = {name: asdict(each) for name, each in sorted(self.files.items())}
        content = {"format": FORMAT, "step": self.step, "about": dict(self.about), "files": files}
        content["sha256"] = _digest(content)
        write_new(folder / MANIFEST, json.dumps(content, indent=1, allow_nan=False) + "\n")


def files_in(folder: Path) -> Iterator[str]:
    """The names of all files in a checkpoint but hidden ones; folders by ``name/``.

    Raises ConfigError for what is no regular file: it may lead anywhere.
    """
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise _broken(folder, f"{entry.name} is no regular file")
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry.name
            continue
        yield from (f"{entry.name}/{name}" for name in files_in(folder / entry.name))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, of sound form; nothing else is looked at.

    Raises ConfigError, naming folder and reason.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ConfigError(f"no such checkpoint: {folder}")
    if path.is_symlink() or not path.is_file():
        raise _broken(folder, f"it has no {MANIFEST}: its writing was cut off, or it is none")
    content = read_json(path, _LARGEST)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        said = content.get("format") if isinstance(content, dict) else None
        raise _broken(folder, f"{MANIFEST} is of another format: {said!r:.60}, not {FORMAT!r}")
    if content.pop("sha256", None) != _digest(content):
        raise _broken(folder, f"{MANIFEST} is not what was written: its own SHA-256 is another")
    step, about, listed = (content.get(key) for key in ("step", "about", "files"))
    if step is not None and not _is_count(step):
        raise _broken(folder, f"{MANIFEST}: step is no number: {step!r:.60}")
    if not isinstance(about, dict) or not isinstance(listed, dict):
        raise _broken(folder, f"{MANIFEST} lacks what it must say")
    return Manifest(step, about, {n: _listed(folder, n, f) for n, f in listed.items()})


def _digest(content: Mapping[str, Any]) -> str:
    """Of all else that a manifest says."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(folder: Path, name: str, said: Any) -> Fingerprint:
    parts = name.split("/")
    is_plain = all(p not in {"", ".", ".."} and not set(p) & set("\\\0:") for p in parts)
    if not is_plain or len(parts) > _MOST_FOLDERS + 1 or name == MANIFEST:
        raise _broken(folder, f"{MANIFEST} names a file outside of it: {name!r:.80}")
    size, digest = (said.get(k) if isinstance(said, dict) else None for k in _FIELDS)
    if not _is_count(size) or not isinstance(digest, str):
        raise _broken(folder, f"{MANIFEST} says nothing that makes sense of {name!r:.80}")
    return Fingerprint(size, digest)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def check(
    folder: Path,
    *,
    by_size: bool = False,
    known: Manifest | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Find a checkpoint whole, or raise ConfigError naming the file that is not what was written.

    Reads all of it, unless ``by_size``. Nothing of it is to be used before. ``known``: what an
    earlier check returned; files that nobody has touched since are not read again. ``tell`` is
    called with the bytes that are done so far.
    """
    manifest = read_manifest(folder)
    for name, said in manifest.files.items():
        size = _size_of(folder, name)
        if size != said.num_bytes:
            raise _broken(folder, f"{name} has {size} bytes, not {said.num_bytes}")
    return manifest if by_size else _compared(folder, manifest, known, tell)


def _size_of(folder: Path, name: str) -> int:
    """Bytes of a regular file to which no link leads."""
    path, parts = folder, name.split("/")
    try:
        for part in parts:
            path /= part
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) if path == folder / name else stat.S_ISDIR(mode)):
                raise _broken(folder, f"{name} is no regular file")
        return path.stat().st_size
    except FileNotFoundError as error:
        raise _broken(folder, f"a file is missing: {name}") from error
    except OSError as error:
        raise _broken(folder, f"{name} cannot be read: {error.strerror}") from error


def _compared(
    folder: Path, manifest: Manifest, known: Manifest | None, tell: Callable[[int], None]
) -> Manifest:
    """The manifest with the stamps of all files, each read unless it has the one that is known.

    Several at a time: the disk is quicker than one SHA-256.
    """
    done, lock, is_over = 0, threading.Lock(), threading.Event()

    def count(num_bytes: int) -> None:
        nonlocal done
        if is_over.is_set():
            raise InterruptedError  # nobody waits for it any more
        with lock:
            done += num_bytes
            tell(done)

    def compare(name: str, said: Fingerprint) -> Stamp:
        path = folder / name
        try:
            stamp = _stamp(path)
            if known is not None and known.has(name, said, stamp):
                count(said.num_bytes)
            elif fingerprint(path, count) != said or _stamp(path) != stamp:
                raise _broken(folder, f"{name} is not what was written: its SHA-256 is another")
        except OSError as error:
            raise _broken(folder, f"{name} cannot be read: {error.strerror}") from error
        return stamp

    readers = ThreadPoolExecutor(_READERS, "reads a checkpoint")
    try:
        found = {name: readers.submit(compare, name, s) for name, s in manifest.files.items()}
        stamps = {name: each.result() for name, each in found.items()}
    finally:
        is_over.set()
        readers.shutdown(cancel_futures=True)
    return replace(manifest, stamps=stamps)


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _broken(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"not a whole checkpoint: {folder}: {why}\nhint: go on from an older checkpoint"
    )
