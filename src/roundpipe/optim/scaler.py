"""Loss scaling: keeps small gradients of fp16 above zero.

A loss is multiplied by the scale before backward and its gradients are divided by it before they
are used, in the same pass as the update. A step whose gradients are not finite is skipped and the
scale shrinks; after many good steps it grows.
"""

from __future__ import annotations

import torch

from roundpipe.errors import ConfigError


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale lives on the host, beside the optimizer.

    Given to ``RoundPipe`` it works by itself: losses are reported unscaled, norms and clipping see
    unscaled gradients, and a step that overflows changes nothing but the scale. Only a loss that
    the caller makes of ``forward``'s outputs is the caller's to scale, as in torch:
    ``scaler.scale(loss).backward()``. Its ``state_dict`` can be exchanged with
    ``torch.amp.GradScaler``; take it when no step is under way. Raises ConfigError for factors that
    do not grow or do not shrink.
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
        if enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

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
