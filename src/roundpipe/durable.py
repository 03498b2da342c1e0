"""Files and folders that are whole or absent, whatever ends the process or the machine.

What is written goes to another name, is brought to the disk and then renamed, which the file system
does at once or not at all. A folder likewise:

    .saving-NAME-TOKEN   being written; its writer, while it lives, holds a lock on it
    NAME                 whole
    .replaced-NAME-TOKEN what had the name before; back in its place if the new one never came
    .removed-NAME-TOKEN  being deleted: a name that nobody takes for a folder of ours

What a process that died has left of these is cleared away by `clear_leftovers`. Everything goes
through the functions of `os` below, one call for one operation of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_PIECE = 4 << 20  # bytes: hashed and written while they are in the cache
_TOKEN = 8  # hexadecimal digits
_BESIDE = re.compile(r"(\.saving-|\.replaced-|\.removed-)(.+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Fingerprint:
    """What a file was when it was written: its bytes, and the SHA-256 of them (hexadecimal)."""

    num_bytes: int
    sha256: str


class HashedFile:
    """A new file whose SHA-256 is known when it is written; raises OSError wherever disks do.

    What is written in the order in which it lies is hashed on the way, anything else is read back
    once at the end.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(path, flags, 0o666)
        self._digest = hashlib.sha256()
        self._hashed = 0  # bytes from the start

    def write_at(self, place: int, data: bytes | memoryview) -> None:
        """Put ``data`` at byte ``place``; blocks until the system has it."""
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while rest:
            piece = rest[:_PIECE]
            written = os.pwrite(self._descriptor, piece, place)
            if place == self._hashed:
                self._digest.update(piece[:written])
                self._hashed += written
            rest, place = rest[written:], place + written

    def finish(self) -> Fingerprint:
        """Bring it to the disk and say what it is."""
        size = os.fstat(self._descriptor).st_size
        while self._hashed < size:
            piece = os.pread(self._descriptor, _PIECE, self._hashed)
            self._digest.update(piece)
            self._hashed += len(piece)
        os.fsync(self._descriptor)
        return Fingerprint(size, self._digest.hexdigest())

    def close(self) -> None:
        """Let go of it, finished or not."""
        os.close(self._descriptor)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fingerprint(path: Path, tell: Callable[[int], None] = lambda _: None) -> Fingerprint:
    """What a file is, by reading all of it. Raises OSError.

    ``tell`` is called with the bytes of each piece that was read.
    """
    digest, size, piece = hashlib.sha256(), 0, bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(piece):
            digest.update(memoryview(piece)[:num])
            size += num
            tell(num)
    return Fingerprint(size, digest.hexdigest())


def write_new(path: Path, text: str) -> Fingerprint:
    """Write a file that is not there yet into a folder that nobody reads yet, and sync it."""
    with HashedFile(path) as file:
        file.write_at(0, text.encode())
        return file.finish()


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all; blocks until the disk has it. Raises OSError.

    A link and what is no file (``/dev/stdout``, a pipe) are written to, never replaced.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    staging = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        sync(staging)
        staging.replace(path)
        sync(path.parent)
    finally:
        staging.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk hold what the system holds of a file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- folders


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write into; it becomes ``folder`` when the block ends.

    What had that name is gone then. The block syncs the files that it writes; the folder is synced
    here. After an error, in the block or here, nothing is left of it and what had the name stays.
    Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder.parent)
    staging = _beside(folder, _SAVING)
    os.mkdir(staging)
    try:
        with _held(staging):
            yield staging
            sync(staging)
            _put_in_place(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder, which is gone as a whole before its files go. Raises OSError."""
    doomed = _beside(folder, _REMOVED)
    os.rename(folder, doomed)
    sync(folder.parent)
    shutil.rmtree(doomed)


def clear_leftovers(parent: Path) -> None:
    """Remove what dead processes have left of folders in ``parent``; bring back what was replaced.

    Folders that a live process is writing stay. Raises OSError.
    """
    for path in sorted(parent.glob(".*")):
        found = _BESIDE.fullmatch(path.name)
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        kind, name = found.groups()
        if kind == _REPLACED and not (parent / name).exists():
            os.rename(path, parent / name)
        elif kind != _SAVING or not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)  # somebody else may be at it


def _put_in_place(staging: Path, folder: Path) -> None:
    old = None
    if folder.exists():
        old = _beside(folder, _REPLACED)
        os.rename(folder, old)
    try:
        os.rename(staging, folder)
    except OSError:
        if old is not None:
            os.rename(old, folder)
        raise
    sync(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{kind}{folder.name}-{secrets.token_hex(_TOKEN // 2)}")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Let others see that a live process uses a folder: the system drops the lock when it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_held(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


if sys.platform == "win32":

    def wait_for_lock(file: IO[Any]) -> None:
        """Windows is served through WSL, and natively without this protection."""

    def _lock(descriptor: int) -> bool:
        return True

else:
    import fcntl

    def wait_for_lock(file: IO[Any]) -> None:
        """Hold an open file until it is closed; blocks while another process holds it.

        Where the file system knows no locks, as if it were held.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)

    def _lock(descriptor: int) -> bool:
        """Whether the lock was had; where the file system knows none, as if it were."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
                raise
        return True
