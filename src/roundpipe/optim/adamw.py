"""AdamW as a function of tensors, and as an optimizer made of it.

`adamw_` is elementwise: a call on a slice equals that slice of a call on the whole. So it walks
through chunks that stay in cache and does everything to one chunk before the next: cast and scale
the gradient, update moments and master, cast the master into the working weights. Separate passes
would move every byte through memory several times, and host bandwidth is what the optimizer lacks.
Operations and their order are those of ``torch.optim.AdamW(foreach=False, fused=False)``: the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim.optimizer import ParamsT

CHUNK = 1 << 18  # elements: five fp32 streams of 1 MB each


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


@torch.no_grad()
def adamw_(  # noqa: PLR0913 - four tensors of one parameter, two numbers, two options
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    c: AdamWConfig,
    *,
    grad_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Update ``master`` and both moments in place; ``step`` counts from 1.

    master, exp_avg, exp_avg_sq: one shape, floating dtype and place. grad: the same shape, any
    floating dtype; left as it is. grad_scale: 0-d, multiplies the gradient first (clipping).
    out: working weights of any floating dtype, get a cast of the new master in the same pass; None
    where the master is the working weight. All memory is allocated before the first write.
    """
    state = (master, exp_avg, exp_avg_sq, *(() if out is None else (out,)))
    size = min(CHUNK, master.numel())
    if not all(t.is_contiguous() for t in state):
        size = master.numel()  # cannot be cut: one chunk in the tensors' own shape
    scratch = master.new_empty((2, size))
    for piece in _chunks((master, grad, exp_avg, exp_avg_sq, out), size):
        _adamw_chunk_(piece, scratch, step, c, grad_scale)


Piece = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _chunks(whole: Piece, size: int) -> Iterator[Piece]:
    master, grad, exp_avg, exp_avg_sq, out = whole
    if size == master.numel():
        yield whole
        return
    flat, grads = master.view(-1), grad.reshape(-1)
    m, v = exp_avg.view(-1), exp_avg_sq.view(-1)
    working = None if out is None else out.view(-1)
    for start in range(0, flat.numel(), size):
        part = slice(start, start + size)
        yield (
            flat[part],
            grads[part],
            m[part],
            v[part],
            None if working is None else working[part],
        )


def _adamw_chunk_(
    piece: Piece, scratch: Tensor, step: int, c: AdamWConfig, grad_scale: Tensor | None
) -> None:
    master, grad, exp_avg, exp_avg_sq, out = piece
    beta1, beta2 = c.betas
    g, denom = (s[: master.numel()].view(master.shape) for s in scratch)
    if grad.dtype != master.dtype:
        grad = g.copy_(grad)
    if grad_scale is not None:
        grad = torch.mul(grad, grad_scale, out=g)
    if c.weight_decay != 0:
        master.mul_(1 - c.lr * c.weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = c.lr / (1 - beta1**step)
    torch.sqrt(exp_avg_sq, out=denom).div_((1 - beta2**step) ** 0.5).add_(c.eps)
    master.addcdiv_(exp_avg, denom, value=-step_size)
    if out is not None:
        out.copy_(master)


Snapshot = dict[Tensor, AdamWConfig]
"""Hyperparameters by parameter as they were at one moment."""


class AdamW(torch.optim.Optimizer):
    """AdamW over master weights, or over any parameters, in place of ``torch.optim.AdamW``.

    Learning-rate schedulers work; a ``state_dict`` can be exchanged with ``torch.optim.AdamW``.
    Given to ``RoundPipe.step`` it updates layer by layer, through `hyperparameters` and `update_`.
    Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _config(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with hyperparameters of their own where given; see torch.optim."""
        _config({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a ``.grad``; return the closure's loss, if given one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        snapshot = self.hyperparameters()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_(parameter, parameter.grad, snapshot)
        return loss

    def hyperparameters(self) -> Snapshot:
        """What every parameter is to be updated with, as of now.

        Later changes to ``param_groups`` do not reach it: updates may run in another thread while
        a scheduler sets the next learning rate. Counts as a step for schedulers.
        """
        self._opt_called = True  # what schedulers look at to warn that they run before the step
        return {p: c for group in self.param_groups for c in (_config(group),)
                for p in group["params"]}  # fmt: skip

    @torch.no_grad()
    def update_(
        self,
        parameter: Tensor,
        grad: Tensor,
        snapshot: Mapping[Tensor, AdamWConfig],
        *,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Update one parameter and its state; see `adamw_` for the arguments.

        Its step is counted last: an update that ran out of memory has changed nothing. Safe beside
        other threads unless they touch this parameter or its state.
        """
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"AdamW needs dense gradients: {grad.layout}\nhint: nn.Embedding(sparse=False)"
            )
        state = self.state[parameter]
        if "exp_avg_sq" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        step: Tensor = state["step"]
        adamw_(
            parameter,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            int(step.item()) + 1,
            snapshot[parameter],
            grad_scale=grad_scale,
            out=out,
        )
        step += 1


def _config(group: Mapping[str, Any]) -> AdamWConfig:
    beta1, beta2 = group["betas"]
    return AdamWConfig(
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )
