"""AdamW as a function of tensors, and as an optimizer made of it.

`adamw_` is elementwise: a call on a slice equals that slice of a call on the whole, wherever it is
cut at a multiple of `forms.CUT`. From equal state one step has the moments of torch's single-tensor
AdamW, and a parameter within 2^-23 (abs(p) + lr): torch's vectorised square root is not always
correctly rounded, ours is (twice that where a step is as large as the weight).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from roundpipe.errors import ConfigError
from roundpipe.optim.execution import resolve, update_in_one_pass_
from roundpipe.optim.operands import Moment, Numbers, Operands, Told
from roundpipe.optim.single_pass import SinglePass

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from roundpipe.optim.execution import Implementation
    from roundpipe.optim.state import Names

_NAMES = (("exp_avg", True), ("exp_avg_sq", False))


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Hyperparameters of one parameter group; checked here, once."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigError(f"lr must not be negative: {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be in [0, 1): {self.betas}")
        if self.eps < 0:
            raise ConfigError(f"eps must not be negative: {self.eps}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must not be negative: {self.weight_decay}")

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        """Those of a parameter group, where a learning rate or a beta may be a tensor."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )

    def names(self) -> Names:
        """The moments kept."""
        return _NAMES

    def numbers(self, step: int, *, is_first: bool = False) -> Numbers:
        """Those of step ``step``, from 1; computed in fp64 as torch does."""
        beta1, beta2 = self.betas
        return Numbers(
            rule="adam",
            decay=1 - self.lr * self.weight_decay,
            first_weight=1 - beta1,
            second_keep=beta2,
            second_weight=1 - beta2,
            root_correction=(1 - beta2**step) ** 0.5,
            eps=self.eps,
            step_size=-self.lr / (1 - beta1**step),
            is_first=is_first,
            draw=draw_for(step),
            told=Told(self.lr, beta1, self.weight_decay, step),
        )


def draw_for(step: int) -> int:
    """32 bits that vary random rounding from step to step."""
    return step * 0xC2B2AE3D & 0xFFFFFFFF


def adamw_(  # noqa: PLR0913 - four tensors of one parameter, two numbers, three options
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    c: AdamWConfig,
    *,
    grad_scale: Tensor | None = None,
    out: Tensor | None = None,
    implementation: Implementation = "auto",
) -> None:
    """Update ``master`` and both moments in place; ``step`` counts from 1.

    master, exp_avg, exp_avg_sq: one shape, floating dtype and place. grad: the same shape, any
    floating dtype; left as it is. grad_scale: 0-d, multiplies the gradient first (clipping).
    out: working weights of any floating dtype, get a cast of the new master in the same pass; None
    where the master is the working weight. All memory is allocated before the first write.
    Compiled for fp32 state on the host, where that can be had; see `execution.resolve`.
    """
    operands = Operands(
        param=master,
        grad=grad,
        first=Moment(exp_avg),
        second=Moment(exp_avg_sq, is_signed=False),
        out=out,
        grad_scale=grad_scale,
    )
    update_in_one_pass_(operands, c.numbers(step), resolve(implementation))


class AdamW(SinglePass[AdamWConfig]):
    """AdamW over master weights, or over any parameters, in place of ``torch.optim.AdamW``.

    Learning-rate schedulers work; where the state is fp32, a ``state_dict`` can be exchanged with
    ``torch.optim.AdamW``. Given to ``RoundPipe.step`` it updates layer by layer, through
    `hyperparameters` and `update_`. ``state_dtype``: ``"fp32"``, ``"bf16"`` or ``"int8"`` (8, 4 or
    2 bytes a parameter for both moments), or the torch dtypes of these names; groups may differ.
    bf16 parameters keep the low halves of their fp32 values in the state (2 bytes).
    ``implementation``: ``"auto"``, ``"compiled"`` or ``"chunks"``. Raises ConfigError for values
    out of range, for fp16 parameters, and if ``"compiled"`` cannot be had.
    """

    signs: ClassVar = dict(_NAMES)

    def __init__(  # noqa: PLR0913 - torch's own, and two more
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | str = "fp32",
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype=state_dtype, implementation=implementation)

    def config(self, group: Mapping[str, Any]) -> AdamWConfig:
        """See SinglePass."""
        return AdamWConfig.of(group)
