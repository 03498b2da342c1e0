"""Loss scaling: keeps small gradients of fp16 above zero.

A loss is multiplied by the scale before backward and its gradients are divided by it before they
are used, in the same pass as the update. A step whose gradients are not finite is skipped and the
scale shrinks; after many good steps it grows.
"""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.errors import ConfigError


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale lives on the host, beside the optimizer.

    Given to ``RoundPipe`` it works by itself: losses are reported unscaled, norms and clipping see
    unscaled gradients, and a step that overflows changes nothing but the scale. Only a loss that
    the caller makes of ``forward``'s outputs is the caller's to scale, as in torch:
    ``scaler.scale(loss).backward()``.

    Kept by the caller it is used as in torch's loop: ``scale`` in ``loss_fn``, ``step`` in the
    function that ``RoundPipe.step`` is given, then ``update``. Losses are reported scaled then.

    Its ``state_dict`` can be exchanged with ``torch.amp.GradScaler``; take it when no step is under
    way. Raises ConfigError for factors that do not grow or do not shrink.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not init_scale > 0:
            raise ConfigError(f"init_scale must be above 0: {init_scale}")
        if not growth_factor > 1:
            raise ConfigError(f"growth_factor must be above 1: {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ConfigError(f"backoff_factor must be between 0 and 1: {backoff_factor}")
        if growth_interval < 1:
            raise ConfigError(f"growth_interval must be at least 1: {growth_interval}")
        super().__init__(
            "cpu", float(init_scale), growth_factor, backoff_factor, growth_interval, enabled
        )
        self._works_alone = False
        if enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def work_alone(self) -> None:
        """Be a model's own from now on: its steps unscale gradients and move the scale."""
        self._works_alone = True

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients that ``optimizer`` holds by the scale, once a step; see torch.

        In the function that ``RoundPipe.step`` is given: only there masters have gradients. Raises
        ConfigError elsewhere, and for a scaler that works by itself.
        """
        if self.is_enabled():
            self._require_gradients(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, unless done, and step ``optimizer`` if all its gradients are finite; see torch.

        Raises ConfigError where `unscale_` does. Returns what the optimizer's step returns.
        """
        if self.is_enabled():
            self._require_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by how the step came out, or set it; after each step, see torch.

        Nothing to do where the scaler works by itself, unless a new scale is given. Raises
        ConfigError if no step was made.
        """
        if not self.is_enabled() or (self._works_alone and new_scale is None):
            return
        checks = (state["found_inf_per_device"] for state in self._per_optimizer_states.values())
        if new_scale is None and not any(checks):
            raise ConfigError(
                "no step was made since the last update\n"
                "hint: model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))"
            )
        super().update(new_scale)

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """What the scale is multiplied by as it grows; always up to date."""
        return super().get_growth_factor()

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """What the scale is multiplied by after a step that overflowed; always up to date."""
        return super().get_backoff_factor()

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """After how many good steps the scale grows; always up to date."""
        return super().get_growth_interval()

    def _require_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._works_alone:
            raise ConfigError(
                "the scaler was given to RoundPipe, whose steps unscale gradients by themselves\n"
                "hint: model.step(optimizer), or leave out grad_scaler="
            )
        held = (p for group in optimizer.param_groups for p in group["params"])
        if all(parameter.grad is None for parameter in held):
            raise ConfigError(
                "the optimizer's parameters have no gradients here: masters have them in the "
                "function that step() is given\n"
                "hint: model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))"
            )

    def count(self, *, is_finite: bool) -> None:
        """Note how a step's gradients came out, and change the scale as torch does."""
        if not self.is_enabled():
            return
        assert self._scale is not None
        assert self._growth_tracker is not None
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            torch.tensor(0.0 if is_finite else 1.0, device="cpu"),
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
        )
