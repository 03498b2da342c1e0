"""What one update of one parameter works on: its tensors and its numbers.

Every rule here is elementwise and does the same kind of thing, so all share one shape: a parameter,
its gradient, up to two moments, and a dozen numbers that were settled before. What executes it
(`compiled.py`, `chunks.py`) knows no optimizer, and an optimizer knows no execution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """A running mean of gradients in one of the forms of `forms.py`.

    ``scale`` [blocks] belongs to 8-bit values. ``is_signed`` is False for means of squares.
    """

    values: Tensor
    scale: Tensor | None = None
    is_signed: bool = True


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The tensors of one update, all of one number of elements.

    ``param`` fp32 or fp64; or bf16 with ``remainder`` (int16), the low halves of the fp32 values
    that are updated. ``grad`` and ``out`` any floating dtype. ``grad_scale`` 0-d.
    """

    param: Tensor
    grad: Tensor
    first: Moment | None = None
    second: Moment | None = None
    remainder: Tensor | None = None
    out: Tensor | None = None
    grad_scale: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """All that hold one value an element."""
        moments = (None if moment is None else moment.values for moment in self.moments)
        for tensor in (self.param, self.grad, self.remainder, self.out, *moments):
            if tensor is not None:
                yield tensor

    @property
    def moments(self) -> tuple[Moment | None, Moment | None]:
        """The first and the second moment."""
        return self.first, self.second


@dataclass(frozen=True)
class Told:
    """What an Adam was told, for code that derives a step's numbers itself."""

    lr: float
    beta1: float
    weight_decay: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """One step's numbers, in the order of operations.

    ``l2`` times the parameter is added to the gradient. Adam: the parameter is multiplied by
    ``decay``; the first moment goes to the gradient by ``first_weight``; the second is kept by
    ``second_keep`` and gets ``second_weight`` of the square; ``step_size`` (negative) times the
    first, over the root of the second over ``root_correction`` plus ``eps``, is added. SGD:
    momentum is kept by ``first_weight`` and gets ``second_keep`` of the gradient, or becomes the
    gradient where ``is_first``. ``draw`` (32 bits) varies stochastic rounding from step to step.
    """

    rule: Literal["adam", "sgd"]
    step_size: float
    l2: float = 0.0
    decay: float = 1.0
    first_weight: float = 0.0
    second_keep: float = 1.0
    second_weight: float = 0.0
    root_correction: float = 1.0
    eps: float = 0.0
    is_nesterov: bool = False
    is_first: bool = False
    draw: int = 0
    told: Told | None = None
