"""A user's function in an optimizer's place.

It finds gradients in ``.grad`` of the masters, as a plain loop would, and is opaque: nobody knows
which optimizer it steps, or whether a loss scaler looks at the gradients first. Two mistakes show
all the same, because every optimizer's ``step`` can be watched while the function runs:

1. An optimizer over working weights would train something that no call ever reads. It is refused.
2. Gradients that are not finite would end in weights and moments for good. A scaler keeps its
   optimizer from them; an optimizer that is stepped in spite of them finds none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from roundpipe.errors import ConfigError
from roundpipe.optim.host import masters_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.store.layer import HostLayer


class StepFunction:
    """See the module docstring. To be called once, in the thread of the caller."""

    def __init__(self, layers: Sequence[HostLayer], function: Callable[[], object]) -> None:
        self._layers = layers
        self._function = function
        self.is_finite = True  # whether all gradients are

    @torch.no_grad()
    def update_whole(self, *, grad_scale: Tensor | None = None, publish: bool = True) -> None:
        """Call the function with gradients in place, then publish what it made of the masters.

        Without ``publish`` masters must have been split. Raises ConfigError for mistake 1 above.
        """
        for layer in self._layers:
            layer.wait_unread()
        for layer in self._layers:
            for name, gradient in layer.take_gradients().items():
                master = layer.masters[name]
                gradient = gradient.to(master.dtype)  # noqa: PLW2901
                master.grad = gradient if grad_scale is None else gradient * grad_scale
        # torch knows no hook for one thread: what other threads step meanwhile holds none of ours.
        watch = register_optimizer_step_pre_hook(self._look)
        try:
            with torch.enable_grad():
                self._function()
        finally:
            watch.remove()
            for layer in self._layers:
                for master in layer.masters.values():
                    master.grad = None
                layer.clear_gradients()
        if publish:
            for layer in self._layers:
                layer.publish()

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for layer in self._layers:
            for name in layer.trainable:
                if layer.tensors[name] in held:
                    raise ConfigError(
                        "the optimizer does not hold master weights but working weights: "
                        f"{name}\nhint: {masters_hint(optimizer)}"
                    )
            if not self.is_finite:
                for master in held.intersection(layer.masters.values()):
                    master.grad = None
