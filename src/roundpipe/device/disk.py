"""How fast a disk takes and gives long files: what saving and loading are made of.

A file is written, forced out, forgotten by the page cache, and read back. The controller's own
cache, or that of a machine around a virtual one, may still hold it: reading is then told too fast.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_PIECE = 16 * 2**20
_SPARE = 4  # times what is written must be free


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second; None: could not be measured."""

    write: float | None
    read: float | None


UNKNOWN = DiskRates(None, None)


def existing(folder: Path) -> Path:
    """``folder``, or what of its parents is there."""
    place = folder.absolute()
    return next((each for each in (place, *place.parents) if each.is_dir()), Path("/"))


def disk_rates(folder: Path, *, num_bytes: int = 2**28, seconds: float = 1.0) -> DiskRates:
    """Write and read back up to ``num_bytes`` in ``folder``, for about ``seconds`` each way.

    Leaves nothing behind. Blocks until the disk has taken all of it, which may last longer.
    """
    try:
        about = os.statvfs(folder)
        if about.f_bavail * about.f_frsize < _SPARE * num_bytes:
            return UNKNOWN
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".roundpipe-", buffering=0) as file:
            written, taken = _written(file.fileno(), num_bytes, seconds)
            with contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return DiskRates(written / taken, written / _read_seconds(file.fileno(), seconds))
    except (OSError, AttributeError):
        return UNKNOWN


def _written(file: int, num_bytes: int, seconds: float) -> tuple[int, float]:
    """The bytes that the disk has taken, and how long it took."""
    piece = os.urandom(min(_PIECE, num_bytes))  # a disk that packs could cheat with zeros
    start, done = time.monotonic(), 0
    while done < num_bytes and time.monotonic() - start < seconds:
        done += os.write(file, piece)
        os.fsync(file)
    return done, max(time.monotonic() - start, 1e-9)


def _read_seconds(file: int, seconds: float) -> float:
    """Seconds for all of the file, by as much of it as is read in ``seconds``."""
    whole, done = os.fstat(file).st_size, 0
    os.lseek(file, 0, os.SEEK_SET)
    start = time.monotonic()
    while done < whole and time.monotonic() - start < seconds:
        done += len(os.read(file, _PIECE))
    if not done:
        raise OSError("nothing of what was written is there")
    return max(time.monotonic() - start, 1e-9) * whole / done
