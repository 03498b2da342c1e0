"""Buffers outside the blocks that a forward changes: every call begins with the same.

Rotary tables of some models depend on the length: those of ``longrope`` are chosen by it, those of
``dynamic`` grow with it, and both are written into a buffer. Prefix, suffix and context run the
same code, on many devices and in any order, so what one call leaves there must not reach another:
such buffers, and attributes beside them, are as they were at wrapping when a call begins. They are
small. A buffer that is saved with the model is no such table, and stays as strict as any.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from roundpipe.models.shell import Home, TreeCopy

_MOST_BYTES = 1 << 20  # of a buffer that is copied; tables of frequencies have some hundred
_SKIPPED = ("_buffers", "_parameters", "_modules", "training")


def are_tables(homes: Iterable[Home]) -> list[Home]:
    """Those where a small buffer hangs that is not saved with the model."""
    return [
        home
        for home in homes
        if not home.is_parameter
        and home.local in home.module._non_persistent_buffers_set
        and home.tensor.nbytes <= _MOST_BYTES
    ]


class Restoring:
    """Keeps the buffers of a tree that are not saved, and the attributes of modules beside them.

    ``rewritten``: where buffers hang that the forward writes to in place.
    """

    def __init__(self, tree: TreeCopy, rewritten: Iterable[Home]) -> None:
        modules = tree.modules()
        self._modules = [m for m in modules if m._non_persistent_buffers_set and m._buffers]
        self._rewritten = [(tree.copy_of(home.module)._buffers, home) for home in rewritten]
        self.changed: set[Home] = set()  # of ``rewritten``, by the last run

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have copies of what is rewritten hang there inside, and afterwards all as it was."""
        saved = [(module, dict(module._buffers), dict(vars(module))) for module in self._modules]
        copies: list[tuple[Home, Tensor, int]] = []
        for held, home in self._rewritten:
            buffer = held[home.local]
            assert buffer is not None, home.name
            held[home.local] = fresh = buffer.clone()
            copies.append((home, fresh, fresh._version))
        try:
            yield
        finally:
            self.changed = {home for home, fresh, version in copies if fresh._version != version}
            for module, buffers, attributes in saved:
                for name in module._non_persistent_buffers_set:
                    if name in buffers:
                        module._buffers[name] = buffers[name]
                _restore(vars(module), attributes)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if name not in _SKIPPED and now.get(name) is not value:
            now[name] = value
