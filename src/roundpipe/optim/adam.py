"""Adam: as AdamW, but weight decay is added to the gradient and so scaled with it.

It takes all that ``torch.optim.Adam`` takes. AMSGrad keeps the largest second moment so far, one
moment more than a single pass has places for, so it is left to torch's own function, parameter by
parameter.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.optim.adam import adam

from roundpipe.errors import ConfigError
from roundpipe.optim.adamw import AdamWConfig
from roundpipe.optim.single_pass import SinglePass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from roundpipe.optim.execution import Implementation
    from roundpipe.optim.operands import Numbers
    from roundpipe.optim.single_pass import Frozen

_MAXIMUM = "max_exp_avg_sq"


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """Hyperparameters of one parameter group; checked once."""

    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        """Those of a parameter group; a state may be older than some of them."""
        return replace(
            super().of(group),
            amsgrad=bool(group.get("amsgrad")),
            maximize=bool(group.get("maximize")),
            decoupled_weight_decay=bool(group.get("decoupled_weight_decay")),
        )

    def numbers(self, step: int, *, is_first: bool = False) -> Numbers:
        """Those of step ``step``, from 1."""
        numbers = super().numbers(step, is_first=is_first)
        if self.decoupled_weight_decay:
            return numbers
        return replace(numbers, decay=1.0, l2=self.weight_decay)


class Adam(SinglePass[AdamConfig]):
    """Adam over master weights, or over any parameters, in place of ``torch.optim.Adam``.

    ``decoupled_weight_decay`` makes it AdamW. ``amsgrad`` needs fp32 (or fp64) parameters and
    state. ``foreach`` and ``fused`` are ignored with a warning: how an update is executed is
    ``implementation``'s. Raises ConfigError for ``capturable`` and ``differentiable``. Everything
    else as in `AdamW`.
    """

    signs: ClassVar = dict(AdamWConfig().names())

    def __init__(  # noqa: PLR0913 - torch's own, and two more
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | str = "fp32",
        implementation: Implementation = "auto",
    ) -> None:
        _refuse(capturable=capturable, differentiable=differentiable)
        for name, value in (("foreach", foreach), ("fused", fused)):
            if value is not None:
                warnings.warn(
                    f"roundpipe.optim.Adam ignores {name}={value}: implementation= says how an "
                    "update is executed",
                    stacklevel=2,
                )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, implementation=implementation)

    def config(self, group: Mapping[str, Any]) -> AdamConfig:
        """See SinglePass."""
        return AdamConfig.of(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See SinglePass; raises ConfigError for AMSGrad over 16-bit values too."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["amsgrad"] and (torch.bfloat16 in dtypes or group["state_dtype"] != "fp32"):
            self.param_groups.pop()
            raise ConfigError(
                "amsgrad=True needs parameters and state in fp32\n"
                "hint: optim_dtype=torch.float32, state_dtype='fp32'"
            )

    @torch.no_grad()
    def update_(
        self,
        parameter: Tensor,
        grad: Tensor,
        snapshot: Mapping[Tensor, Frozen[AdamConfig]],
        *,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """See SinglePass."""
        config = snapshot[parameter].config
        if config.maximize:
            one = torch.ones((), device=grad.device)
            grad_scale = -(one if grad_scale is None else grad_scale)
        if config.amsgrad:
            self._update_by_torch_(parameter, grad, config, grad_scale, out)
            return
        super().update_(parameter, grad, snapshot, grad_scale=grad_scale, out=out)

    def _update_by_torch_(
        self,
        parameter: Tensor,
        grad: Tensor,
        config: AdamConfig,
        grad_scale: Tensor | None,
        out: Tensor | None,
    ) -> None:
        """AMSGrad. Takes memory for one gradient in the parameter's dtype."""
        known = self.state[parameter]
        state = dict(known)
        for name in (*self.signs, _MAXIMUM):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        cast = grad.to(parameter.dtype)
        cast = cast if grad_scale is None else cast * grad_scale
        adam(
            [parameter],
            [cast],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state[_MAXIMUM]],
            [state["step"]],
            foreach=False,
            fused=False,
            amsgrad=True,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=config.lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
            decoupled_weight_decay=config.decoupled_weight_decay,
        )
        known.update(state)
        if out is not None:
            out.copy_(parameter)


def _refuse(**flags: bool) -> None:
    for name, value in flags.items():
        if value:
            raise ConfigError(f"not supported: {name}=True\nhint: leave it out")
