"""A host thread that issues work, task after task.

It knows the queue, never who filled it: an engine that is dropped is collected although its pool's
threads live on. Tasks do not raise; what could fail in them is reported by whoever made them.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """One thread with a queue. ``close`` lets it finish what was put."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue,), name=f"roundpipe {name} worker", daemon=True
        )
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task`` after all that was put before."""
        self._queue.put(task)

    def close(self, timeout: float | None = None) -> None:
        """End the thread once it has run what was put. From any thread, any number of times."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)


def is_worker() -> bool:
    """Whether this is one of our threads: a device's, or one that issues."""
    return threading.current_thread().name.startswith("roundpipe ")


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException:
            logger.exception("a task of %s raised", threading.current_thread().name)
        del task  # while the queue is empty the last run must not be kept alive
