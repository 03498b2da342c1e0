"""Adam: as AdamW, but weight decay is added to the gradient and so scaled with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from roundpipe.optim.adamw import AdamWConfig
from roundpipe.optim.single_pass import SinglePass

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from roundpipe.optim.execution import Implementation
    from roundpipe.optim.operands import Numbers


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """Hyperparameters of one parameter group; checked once."""

    weight_decay: float = 0.0

    def numbers(self, step: int, *, is_first: bool = False) -> Numbers:
        """Those of step ``step``, from 1."""
        numbers = super().numbers(step, is_first=is_first)
        return replace(numbers, decay=1.0, l2=self.weight_decay)


class Adam(SinglePass[AdamConfig]):
    """Adam over master weights, or over any parameters, in place of ``torch.optim.Adam``.

    Everything else as in `AdamW`.
    """

    signs: ClassVar = dict(AdamWConfig().names())

    def __init__(  # noqa: PLR0913 - torch's own, and two more
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state_dtype: torch.dtype | str = "fp32",
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype=state_dtype, implementation=implementation)

    def config(self, group: Mapping[str, Any]) -> AdamConfig:
        """See SinglePass."""
        return AdamConfig.of(group)
