"""Gives back to the system what Python has freed.

The C library keeps freed pieces of up to 32 MB for itself: what a model's tensors lay in stays with
the process when they move into segments, whose pages come from the system. As far as anybody else
on the machine can see the model is then there twice. So it is with what CPU devices compute in.
"""

from __future__ import annotations

import ctypes
import sys


class FreedMemory:
    """Counts what is freed, and has the C library let go of it now and then."""

    def __init__(self, *, every: int = 1 << 26) -> None:
        self._every, self._pending = every, 0
        # glibc's; others have none, and need none
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)

    def add(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` were freed; takes about a millisecond each ``every`` bytes."""
        self._pending += num_bytes
        if self._pending >= self._every:
            self.give_back()

    def give_back(self) -> None:
        """Let go of what is free now, if any was noted."""
        if self._trim is not None and self._pending:
            self._trim(0)
        self._pending = 0
