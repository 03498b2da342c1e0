"""One step of an optimizer that we know nothing about: any ``torch.optim.Optimizer``.

It runs later and in another thread than the call of ``step`` that it belongs to, with the groups of
that call: through a twin (`roundpipe.optim.twin`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roundpipe.optim.twin import Twin, frozen_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from roundpipe.store.layer import HostLayer


class WholeUpdate:
    """One step's update of all layers at once."""

    def __init__(
        self, optimizer: Optimizer, layers: Sequence[HostLayer], held: Set[Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._layers = layers
        self._held = held
        self._groups = frozen_groups(optimizer)
        # Schedulers look at this to warn that they run before the optimizer's step.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def update_whole(self, *, grad_scale: Tensor | None = None, publish: bool = True) -> None:
        """Step all masters with the gradients that arrived, times ``grad_scale`` (0-d).

        Then casts them into the working weights, unless ``publish`` is False (masters must have
        been split), and clears all gradients. Masters without a gradient have ``grad`` None. Not
        resumable: what a failure of the optimizer leaves behind is up to the optimizer. Blocks
        while somebody reads a layer.
        """
        for layer in self._layers:
            layer.wait_unread()
        masters = [m for layer in self._layers for m in self._give_gradients(layer, grad_scale)]
        assert publish or not any(x.is_alias(n) for x in self._layers for n in x.masters)
        try:
            self._step()
        finally:
            for master in masters:
                master.grad = None
        for layer in self._layers:
            if publish:
                layer.publish()
            layer.clear_gradients()

    def _give_gradients(
        self, layer: HostLayer, grad_scale: Tensor | None
    ) -> Iterator[nn.Parameter]:
        """Set ``.grad`` in the master's dtype: what arrived itself where it has that dtype."""
        for name, arrived in layer.take_gradients().items():
            master = layer.masters[name]
            if master in self._held:
                grad = arrived.to(master.dtype)
                master.grad = grad if grad_scale is None else grad.mul_(grad_scale)
                yield master

    def _step(self) -> None:
        optimizer = self._optimizer
        if "param_groups" not in vars(optimizer):  # a wrapper that keeps its groups elsewhere
            optimizer.step()
            return
        changes = Twin(optimizer, self._groups).step()
        for group, changed in zip(optimizer.param_groups, changes, strict=False):
            group.update(changed)
