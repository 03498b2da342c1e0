"""How much of something there is, as a function of the tokens at hand.

Whatever a transformer computes, moves or keeps for one microbatch is a constant (weights), or goes
with its tokens (hidden states), or with tokens times length (attention). So three counts at three
lengths tell all lengths, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOISE = 1e-9  # of the largest count: what solving three equations leaves of a zero


@dataclass(frozen=True, slots=True)
class Amount:
    """``fixed + per_token * tokens + per_pair * tokens * length``."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def at(self, tokens: int, length: int) -> float:
        """The amount for a microbatch of ``tokens`` in sequences of ``length``."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * length

    @classmethod
    def through(cls, lengths: Sequence[int], counts: Sequence[float]) -> Self:
        """The amount that was counted on one sequence of each of three different lengths.

        Newton's form of the parabola through three points; what is left of a zero becomes one.
        """
        (a, b, c), (x, y, z) = lengths, counts
        first, second = (y - x) / (b - a), (z - y) / (c - b)
        square = (second - first) / (c - a)
        line = first - square * (a + b)
        fixed = x - line * a - square * a * a
        noise = _NOISE * max(abs(x), abs(y), abs(z))
        return cls(
            fixed if abs(fixed) > noise else 0.0,
            line if abs(line) * c > noise else 0.0,
            square if abs(square) * c * c > noise else 0.0,
        )
