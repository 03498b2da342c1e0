"""Exceptions out of work, and the one that nobody was told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Untold:
    """Hands exceptions to whoever launched the work; keeps the first that has no taker."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def tell(self, error: BaseException, on_error: Callable[[BaseException], None] | None) -> None:
        """Call ``on_error``; keep ``error`` without one, and what ``on_error`` itself raises."""
        if on_error is None:
            self._first = self._first or error
            return
        try:
            on_error(error)
        except BaseException as second:
            self._first = self._first or second

    def raise_first(self) -> None:
        """Raise what was kept, once."""
        first, self._first = self._first, None
        if first is not None:
            raise first
