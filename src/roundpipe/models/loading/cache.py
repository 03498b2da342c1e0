"""Where segment files of a model are kept, and what they were made from.

    CACHE / NAME-FINGERPRINT / manifest.json   0000.segment   0001.segment   ...

The folder's name holds a fingerprint of all that decides the bytes: the files (their names, sizes,
times and headers), the config, dtype and quantization, and the versions that convert. A layer's
file is complete or absent, so a repack that was broken off goes on where it ended.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import re
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.durable import wait_for_lock
from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roundpipe.models.loading.shards import Shards

_FORMAT = 1
_SPARE = 64 << 20  # bytes of the disk that stay free
_CONVERTERS = ("transformers", "bitsandbytes")


def default_cache() -> Path:
    """Where segment files are kept if nothing else is said: below the user's home."""
    return Path.home() / ".cache" / "roundpipe" / "segments"


def fingerprint(shards: Shards, **settings: Any) -> str:
    """Sum up, as hexadecimal digits, what decides the bytes of a model's segment files."""
    files = [_file_mark(path) for path in shards.files]
    config = hashlib.sha256((shards.folder / "config.json").read_bytes()).hexdigest()
    versions = {name: _version(name) for name in _CONVERTERS}
    told = [_FORMAT, files, config, versions, {k: str(v) for k, v in sorted(settings.items())}]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def cache_folder(cache: Path, name: str, mark: str) -> Path:
    """The folder of one model; ``name``, whatever it holds, becomes a plain part of a path."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip(".-")[:80] or "model"
    return cache / f"{plain}-{mark[:16]}"


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError unless the disk of ``folder`` has room for ``num_bytes`` more."""
    free = shutil.disk_usage(folder).free
    if num_bytes + _SPARE > free:
        raise ConfigError(
            f"segment files do not fit the disk: {folder}: {num_bytes / 1e9:.1f} GB needed, "
            f"{free / 1e9:.1f} GB free\n"
            "hint: cache_folder=FOLDER on another disk, or quantization=nf4, which needs a quarter"
        )


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write, for people, what the folder holds; nothing reads it back.

    Raises ConfigError where it cannot be written.
    """
    text = json.dumps(content, indent=1) + "\n"
    path = folder / "manifest.json"
    try:
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_here(folder, error) from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder, waiting while another process repacks there; clear what it broke off.

    A folder that is there and cannot be written, as on a disk that many machines read, needs no
    holding. Raises ConfigError where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES) and folder.is_dir():
            yield
            return
        raise _not_here(folder, error) from error
    with file:
        wait_for_lock(file)
        for part in folder.glob("*.part"):
            with suppress(OSError):
                part.unlink()
        yield


def _not_here(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"segment files cannot be kept here: {folder}: {error}\nhint: cache_folder=FOLDER"
    )


def _file_mark(path: Path) -> list[Any]:
    status = path.stat()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = hashlib.sha256(file.read(length)).hexdigest()
    return [path.name, status.st_size, status.st_mtime_ns, header]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
