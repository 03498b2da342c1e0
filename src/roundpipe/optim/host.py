"""Runs an optimizer over the host store, layer by layer where the optimizer allows it.

Two kinds. Our own `AdamW` is *layered*: it updates one parameter at a time, so the layers that the
next step needs first can be ready first. Any other ``torch.optim`` optimizer only knows how to step
as a whole.

The learning rate is the one at the call of ``step``, while the update itself runs later in another
thread and the caller's scheduler has moved on. So `HostOptimizer.begin` freezes what the optimizer
is told and returns an `Update`: one for each training step, several may be alive (staleness 1).

    begin (caller's thread) -> update_layer(0), update_layer(1), ... | update_whole (host thread)
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.optim.adamw import AdamW
from roundpipe.optim.whole import WholeUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from roundpipe.store.layer import HostLayer


class HostOptimizer:
    """Knows which layers' masters an optimizer holds.

    Raises ConfigError if it holds anything else, for example a model's working weights.
    """

    def __init__(self, optimizer: Optimizer, layers: Sequence[HostLayer]) -> None:
        self.optimizer = optimizer
        self.layers = tuple(layers)
        self._refuse_strangers()

    @property
    def is_layered(self) -> bool:
        """Whether it updates layer by layer (`LayeredUpdate`) or only as a whole."""
        return isinstance(self.optimizer, AdamW)

    def begin(self) -> LayeredUpdate | WholeUpdate:
        """Freeze hyperparameters and parameter groups for one step; blocks on nothing.

        Raises ConfigError if parameters were added since that are not masters.
        """
        held = self._refuse_strangers()
        if not isinstance(self.optimizer, AdamW):
            return WholeUpdate(self.optimizer, self.layers, held)
        return LayeredUpdate(
            self.optimizer,
            {layer.index: layer for layer in self.layers},
            {x.index: [n for n, p in x.masters.items() if p in held] for x in self.layers},
        )

    def _refuse_strangers(self) -> set[Tensor]:
        """The parameters held, all of them masters of ours or once so (frozen since)."""
        held = {p for group in self.optimizer.param_groups for p in group["params"]}
        strangers = held.difference(
            *(layer.masters.values() for layer in self.layers),
            *(layer.retired_masters.values() for layer in self.layers),
        )
        if not strangers:
            return held
        working = [n for layer in self.layers for n, t in layer.tensors.items() if t in strangers]
        what = (
            f"working weights: {working[0]}" if working else "parameters that are not the model's"
        )
        kind = type(self.optimizer)
        module = kind.__module__.rpartition(".")[0] or kind.__module__
        module = "roundpipe.optim" if kind.__name__ == "AdamW" else module
        lr = float(self.optimizer.param_groups[0].get("lr", 1e-3))
        raise ConfigError(
            f"the optimizer does not hold master weights but {what} "
            f"({len(strangers)} of its {len(held)} parameters)\n"
            f"hint: {module}.{kind.__name__}(model.optim_parameters(), lr={lr})"
        )


class LayeredUpdate:
    """One step's updates, layer by layer, in any order of layers.

    Layers may be updated from one thread while the caller's thread prepares the next step.
    """

    def __init__(
        self,
        optimizer: AdamW,
        layers: Mapping[int, HostLayer],
        parameters: Mapping[int, Sequence[str]],
    ) -> None:
        self._optimizer = optimizer
        self._layers = layers
        self._left = {index: deque(names) for index, names in parameters.items()}
        self._snapshot = optimizer.hyperparameters()

    def update_layer(
        self, index: int, *, grad_scale: Tensor | None = None, publish: bool = True
    ) -> None:
        """Update layer ``index`` with the gradients that arrived, times ``grad_scale`` (0-d).

        Also writes its working weights, unless ``publish`` is False: then masters must have been
        split. Parameters without a gradient are neither decayed nor stepped. Clears the layer's
        gradients at the end. After a failure a second call goes on with the parameter that failed;
        once the layer is done, further calls do nothing.
        """
        left = self._left.get(index)
        if left is None:
            return
        layer = self._layers[index]
        gradients = layer.take_gradients()
        while left:
            name = left[0]
            alias = layer.is_alias(name)
            assert publish or not alias, f"the master is the working weight: {name}"
            if name in gradients:
                self._optimizer.update_(
                    layer.masters[name],
                    gradients[name],
                    self._snapshot,
                    grad_scale=grad_scale,
                    out=layer.weights.views[name] if publish and not alias else None,
                )
            left.popleft()
        layer.clear_gradients()
        del self._left[index]
