"""Files that are whole or absent, whatever ends the process or the machine.

A file is written under another name, brought to the disk and then renamed, which the file system
does at once or not at all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all; blocks until the disk has it. Raises OSError."""
    staging = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        sync(staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk hold what the system holds of a file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
