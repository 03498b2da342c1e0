"""What one run of a layer is under: a dispatch mode, all over it or in some of its modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roundpipe.engine.gates import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.engine.choices import Noting, Replaying
    from roundpipe.engine.gates import Gates, Innermost
    from roundpipe.engine.random import DrawsFrom

_NOTHING = nullcontext()  # which may be entered any number of times at once


@dataclass
class Modes:
    """What one run of a layer is under.

    ``choices`` are looked at in the modules at ``places``, all over the layer if these are none or
    `OUTSIDE` is among them. ``is_whole``: whether random draws are the layer's own all over it.
    """

    mode: DrawsFrom | None = None
    choices: Noting | Replaying | None = None
    places: frozenset[int] = frozenset()
    gates: Gates | None = None
    watch: Innermost | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        if OUTSIDE in self.places:
            self.places = frozenset()
        self.is_whole = self.is_whole or (self.choices is not None and not self.places)

    def on(self) -> AbstractContextManager[None]:
        """Let what runs inside be under it."""
        return _NOTHING if self.mode is None else self._on(self.mode)

    @contextmanager
    def _on(self, mode: DrawsFrom) -> Iterator[None]:
        if not self.places:
            mode.choices = self.choices
            with self.watch.watching() if self.watch is not None else nullcontext(), mode:
                yield
            return
        assert self.gates is not None
        if self.is_whole:
            with mode, self.gates.opening(self.places, self._look, self._look_away):
                yield
            return
        mode.choices = self.choices
        with self.gates.opening(
            self.places, mode.__enter__, partial(mode.__exit__, None, None, None)
        ):
            yield

    def _look(self) -> None:
        assert self.mode is not None
        self.mode.choices = self.choices

    def _look_away(self) -> None:
        assert self.mode is not None
        self.mode.choices = None

    def end(self) -> tuple[bool, frozenset[int]]:
        """The layer has run: whether it drew, and in which modules it chose.

        Raises ModelError where a recompute came to other choices than its forward.
        """
        if self.choices is not None:
            self.choices.end()
        draws = self.mode is not None and self.mode.generator is not None
        return draws, frozenset(self.watch.places) if self.watch is not None else self.places
