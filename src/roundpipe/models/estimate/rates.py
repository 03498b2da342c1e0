"""How long work takes on a card: the larger of arithmetic and memory traffic, sort by sort.

A card's rates are what long matrix products and copies get of it (`roundpipe.plan.machine.Card`).
What other work gets is in `Efficiency`, the one place for such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.models.estimate.profile import ATTENTION, EXPERTS, MATRIX, WIDE

if TYPE_CHECKING:
    from roundpipe.models.estimate.profile import Pass, Work
    from roundpipe.plan.machine import Card


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a card's rates, and what a kernel costs however little it does.

    ``fp16_fp16`` and ``traffic`` are solved from two published times, forward and backward of one
    layer of Llama 3.1 8B on an RTX 4090 (4 sequences of 2048), and from nothing else:

    - ``fp16_fp16``: of matrix products that are added up in fp16. The card's rate is that of a
      long run of them at its power limit; between other work they are faster.
    - ``traffic``: of the bytes that operations read and write one by one, those that reach the
      card's memory; caches save the rest.
    """

    fp16_fp16: float = 1.12
    traffic: float = 0.65
    kernel_seconds: float = 3e-6
    call_seconds: float = 6e-6  # of Python, for each operation issued in forward
    backward_seconds: float = 60e-6  # of Python for a layer's backward, which C++ issues
    gradient_seconds: float = 12e-6  # of Python for each gradient that backward collects


DEFAULT = Efficiency()


@dataclass(frozen=True)
class Arithmetic:
    """Which of a card's rates work gets. Keys are those of ``Card.flops``.

    ``kernels``: of attention and of grouped products of experts, which always add up in fp32.
    """

    matrix: str
    kernels: str

    @classmethod
    def of(cls, dtype: str, *, fp16_accumulation: bool = False) -> Arithmetic:
        """The arithmetic of a working dtype. Raises ConfigError for one that there is none of."""
        if dtype not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"unknown dtype: {dtype}\nhint: dtype=bf16, fp16 or fp32")
        if fp16_accumulation and dtype != "fp16":
            raise ConfigError(f"fp16_accumulation needs fp16: dtype={dtype}\nhint: dtype=fp16")
        return cls("fp16_fp16" if fp16_accumulation else dtype, dtype)


def seconds(
    run: Pass, card: Card, arithmetic: Arithmetic, at: tuple[int, int], given: Efficiency = DEFAULT
) -> float:
    """How long a pass takes for ``at``: tokens of the microbatch and length of its sequences.

    Raises ConfigError if the card cannot compute in this dtype.
    """
    return sum(
        _seconds(sort, work, card, arithmetic, at, given) for sort, work in run.works.items()
    )


def _seconds(
    sort: str,
    work: Work,
    card: Card,
    arithmetic: Arithmetic,
    at: tuple[int, int],
    given: Efficiency,
) -> float:
    compute = 0.0
    if flops := work.flops.at(*at):
        compute = flops / _rate(sort, card, arithmetic, given)
    is_kernel = sort in (MATRIX, EXPERTS, ATTENTION)
    moved = work.moved.at(*at) * (1.0 if is_kernel else given.traffic)
    return max(compute, moved / card.bandwidth) + work.kernels * given.kernel_seconds


def _rate(sort: str, card: Card, arithmetic: Arithmetic, given: Efficiency) -> float:
    key = arithmetic.kernels if sort in (ATTENTION, EXPERTS) else arithmetic.matrix
    if sort == WIDE:
        key = "fp32"
    if key not in card.flops:
        known = ", ".join(card.flops)
        raise ConfigError(f"{card.name} does not compute in {key}\nhint: dtype={known}")
    return card.flops[key] * (given.fp16_fp16 if key == "fp16_fp16" else 1.0)
