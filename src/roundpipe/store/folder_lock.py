"""Keep two live processes out of one folder.

The operating system holds the lock and drops it when the process ends, however it ends. A file that
only names a pid would outlive a crash, and pids are used again, in containers at once. The pid is
written into the file all the same, for the message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_FILE = ".lock"


@contextlib.contextmanager
def lock_folder(folder: Path, *, key: str) -> Iterator[None]:
    """Hold ``folder`` while the block runs. Raises ConfigError at once if a live process holds it.

    Also where this user may not write there. ``key``: the option that named the folder, for the
    message. Where the file system knows no locks the folder is not held and the block runs.
    """
    path = folder / LOCK_FILE
    descriptor = _open_locked(folder, path, key)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its message
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still locked; who waited sees that it is gone
        os.close(descriptor)


def _open_locked(folder: Path, path: Path, key: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{key}: {folder} cannot be written to: {error.strerror or error}"
                f"\nhint: {key}=ANOTHER"
            ) from error
        try:
            _lock(descriptor)
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{key}: {folder} is in use by the live process {holder}\n"
                f"hint: {key}=ANOTHER, or wait until that run has ended"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our two calls


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


if sys.platform == "win32":

    def _lock(descriptor: int) -> None:
        """Nothing: Windows is served through WSL, and natively without this protection."""

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        """Take the lock, or raise BlockingIOError at once."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
