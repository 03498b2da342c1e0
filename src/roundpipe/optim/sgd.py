"""SGD with momentum, dampening, Nesterov's look ahead and weight decay, as torch defines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from roundpipe.errors import ConfigError
from roundpipe.optim.adamw import draw_for
from roundpipe.optim.operands import Numbers
from roundpipe.optim.single_pass import SinglePass

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from roundpipe.optim.execution import Implementation
    from roundpipe.optim.state import Names

_NAMES = (("momentum_buffer", True),)


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Hyperparameters of one parameter group; checked here, once."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ConfigError(
                f"nesterov needs momentum and no dampening: momentum {self.momentum}, "
                f"dampening {self.dampening}\nhint: nesterov=False"
            )

    def names(self) -> Names:
        """The moments kept."""
        return _NAMES if self.momentum else ()

    def numbers(self, step: int, *, is_first: bool) -> Numbers:
        """Those of step ``step``, from 1; ``is_first``: the momentum is new."""
        return Numbers(
            rule="sgd",
            l2=self.weight_decay,
            first_weight=self.momentum,
            second_keep=1 - self.dampening,
            step_size=-self.lr,
            is_nesterov=self.nesterov,
            is_first=is_first,
            draw=draw_for(step),
        )


class SGD(SinglePass[SGDConfig]):
    """SGD over master weights, or over any parameters, in place of ``torch.optim.SGD``.

    Everything else as in `AdamW`; ``state_dtype`` is that of the momentum.
    """

    signs: ClassVar = dict(_NAMES)

    def __init__(  # noqa: PLR0913 - torch's own, and two more
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        state_dtype: torch.dtype | str = "fp32",
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, implementation=implementation)

    def config(self, group: Mapping[str, Any]) -> SGDConfig:
        """See SinglePass."""
        return SGDConfig(
            **{
                name: float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")
            },
            nesterov=bool(group["nesterov"]),
        )
