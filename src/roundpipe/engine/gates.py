"""Where in a layer choices are made, so that watching them costs the rest of it nothing.

A dispatch mode costs more than ten microseconds an operation, and a mixture's block has a hundred
of which its router is ten. So in the first run of a layer it is noted which modules choose, by
their number in the module tree (every copy of the tree has the same), and later runs have the mode
on only while these run.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

OUTSIDE = -1  # of any module: in what calls them


class Innermost:
    """Tells which module of a tree is running, the innermost one; to be asked in `watching`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._running: list[int] = []
        self.places: set[int] = set()  # where `note` was called

    def note(self) -> None:
        """Something was chosen here."""
        self.places.add(self._running[-1] if self._running else OUTSIDE)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow calls of all modules."""

        def enter(place: int) -> None:
            self._running.append(place)

        def leave(_: int) -> None:
            self._running.pop()

        handles = []
        for place, module in enumerate(self._root.modules()):
            handles += _around(module, place, enter, leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()


class Gates:
    """Hooks on some modules of one shell's tree, that do nothing but in `opening`."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        self._hooked: set[int] = set()
        self._open: frozenset[int] = frozenset()
        self._depth = 0
        self._on: Callable[[], object] = object
        self._off: Callable[[], object] = object

    @contextmanager
    def opening(
        self, places: frozenset[int], on: Callable[[], object], off: Callable[[], object]
    ) -> Iterator[None]:
        """Call ``on`` before any of the modules at ``places`` runs, and ``off`` behind it."""
        for place in places - self._hooked:
            _around(self._modules[place], place, self._enter, self._leave)
            self._hooked.add(place)
        self._open, self._on, self._off, self._depth = places, on, off, 0
        try:
            yield
        finally:
            self._open, self._on, self._off = frozenset(), object, object
            if self._depth:  # left by an exception
                off()

    def _enter(self, place: int) -> None:
        if place in self._open:
            self._depth += 1
            if self._depth == 1:  # not again in a module within another
                self._on()

    def _leave(self, place: int) -> None:
        if place in self._open:
            self._depth -= 1
            if self._depth == 0:
                self._off()


def _around(
    module: nn.Module, place: int, enter: Callable[[int], None], leave: Callable[[int], None]
) -> list[Any]:
    """Call ``enter`` first and ``leave`` last in every call of a module, if it raises too."""
    return [
        module.register_forward_pre_hook(lambda _m, _a: enter(place), prepend=True),
        module.register_forward_hook(lambda _m, _a, _o: leave(place), always_call=True),
    ]
