"""Counts what crosses a device's link: bytes and copies of each kind of action.

One stream runs all actions of one kind on a device, so each number has one writer and needs no
lock. Reading while work is under way gives what has been copied, or put on a stream, so far.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Op

if TYPE_CHECKING:
    from collections.abc import Iterable

UP = (Op.UPLOAD, Op.ACTIVATION_IN, Op.GRADIENT_IN)
DOWN = (Op.DOWNLOAD, Op.ACTIVATION_OUT, Op.GRADIENT_OUT)


def _none() -> Counter[Op]:
    """All kinds from the start: a reader may go through them while writers count."""
    return Counter(dict.fromkeys((*UP, *DOWN), 0))


@dataclass
class Traffic:
    """``num_bytes`` and ``copies`` by op: `Op.UPLOAD` for weights, `Op.DOWNLOAD` for gradients."""

    num_bytes: Counter[Op] = field(default_factory=_none)
    copies: Counter[Op] = field(default_factory=_none)

    @classmethod
    def sum(cls, parts: Iterable[Traffic]) -> Traffic:
        """What all of ``parts`` together have moved so far."""
        total = cls()
        for part in parts:
            total.num_bytes.update(part.num_bytes)
            total.copies.update(part.copies)
        return total

    def add(self, op: Op, num_bytes: int, copies: int = 1) -> None:
        """Count what one action copies."""
        self.num_bytes[op] += num_bytes
        self.copies[op] += copies

    def since(self, before: Traffic) -> Traffic:
        """What was moved after ``before`` was read."""
        return Traffic(self.num_bytes - before.num_bytes, self.copies - before.copies)

    @property
    def up_bytes(self) -> int:
        """Host to device: weights, activations, gradients of activations."""
        return sum(self.num_bytes[op] for op in UP)

    @property
    def down_bytes(self) -> int:
        """Device to host: gradients, activations, gradients of activations, losses."""
        return sum(self.num_bytes[op] for op in DOWN)
