"""A checkpoint that is being written, or is done: in the caller's thread, or in one of its own."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)


class SavedCheckpoint:
    """What ``save_checkpoint`` returns: ``folder`` is whole when `wait` has returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_done = False
        self._is_told = False

    def __repr__(self) -> str:
        state = "done" if self._is_done else "being written"
        return f"SavedCheckpoint({str(self.folder)!r}, {'failed' if self._failure else state})"

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed: whether `wait` would return at once."""
        return self._is_done

    def wait(self) -> None:
        """Block until it is on the disk; raises what failed, every time. Training may go on."""
        self.join()
        self._is_told = True
        if self._failure is not None:
            raise self._failure

    def require_told(self) -> None:
        """Block likewise; raise what failed unless somebody has been told."""
        self.join()
        if not self._is_told:
            self.wait()

    def join(self) -> None:
        """Block likewise; raise nothing."""
        if self._thread is not None:
            self._thread.join()

    # ---- for who writes it

    def run(self, write: Callable[[], None]) -> None:
        """Write here and now; raises what failed."""
        try:
            write()
        except BaseException as error:
            self._failure, self._is_told = error, True
            raise
        finally:
            self._is_done = True

    def start(self, write: Callable[[], None]) -> None:
        """Write in a thread that ends with it."""

        def work() -> None:
            try:
                write()
            except BaseException as error:  # told by `wait`
                logger.error("a checkpoint was not written: %s", error)  # noqa: TRY400 - as told
                self._failure = error
            self._is_done = True

        thread = threading.Thread(target=work, name=f"writes {self.folder.name}")
        thread.start()
        self._thread = thread
