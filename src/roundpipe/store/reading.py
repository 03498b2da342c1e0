"""Who reads a layer's tensors on the host while training goes on, and who waits for that.

[Note: a layer is written to disk before it is updated again] A checkpoint is written beside the
next step, from the very memory that training uses: a second copy of all state would not fit. Until
an update commits, a step changes no master, moment or working weight, and the updates come layer by
layer, front first. So the writer goes through the layers in that order, and whoever is about to
change a layer that it has not done with yet waits: updates, publishing, whatever the host does. Who
reads holds nothing that anybody else waits for, so it always gets on.
"""

from __future__ import annotations

import threading


class Reading:
    """One layer, being read; over once, for good."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def end(self) -> None:
        """Let those go on who want to write. Idempotent; called from any thread."""
        self._over.set()

    def wait(self) -> None:
        """Block until it is over."""
        self._over.wait()

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to wait any more."""
        return self._over.is_set()
