"""Runs an optimizer over the host store, layer by layer where the optimizer allows it.

Two kinds. A *layered* optimizer updates one parameter at a time, so the layers that the next step
needs first can be ready first: those of `roundpipe.optim`, and the many of ``torch.optim`` that
treat each parameter on its own. Any other optimizer only knows how to step as a whole.

The learning rate is the one at the call of ``step``, while the update itself runs later in another
thread and the caller's scheduler has moved on. So `HostOptimizer.begin` freezes what the optimizer
is told and returns an `Update`: one for each training step, several may be alive (staleness 1).

    begin (caller's thread) -> update_layer(0), update_layer(1), ... | update_whole (host thread)
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from roundpipe import optim
from roundpipe.errors import ConfigError
from roundpipe.optim.layered import as_layered
from roundpipe.optim.on_disk import StateOnDisk
from roundpipe.optim.whole import WholeUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from roundpipe.optim.layered import Layered
    from roundpipe.store.layer import HostLayer

logger = logging.getLogger(__name__)


class HostOptimizer:
    """Knows which layers' masters an optimizer holds, and how it can be stepped.

    ``state_dir``: where state and masters are between updates, see `StateOnDisk`, also for
    ``resume``; nothing may be under way then. Raises ConfigError if the optimizer holds anything
    else, for example a model's working weights, or if its state is to be on disk and it only steps
    as a whole.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[HostLayer],
        *,
        state_dir: Path | None = None,
        resume: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.layers = tuple(layers)
        self.on_disk: StateOnDisk | None = None
        self._refuse_strangers()
        layered = as_layered(optimizer)
        if isinstance(layered, str):
            logger.info("the optimizer steps all layers at once: %s", layered)
        if state_dir is not None:
            self._require_layered(layered)
            self.on_disk = StateOnDisk(state_dir, optimizer, layers, resume=resume)

    @property
    def is_layered(self) -> bool:
        """Whether it updates layer by layer (`LayeredUpdate`) or only as a whole."""
        return not isinstance(as_layered(self.optimizer), str)

    def begin(self) -> LayeredUpdate | WholeUpdate:
        """Freeze hyperparameters and parameter groups for one step; blocks on nothing.

        Raises ConfigError if parameters were added since that are not masters.
        """
        held = self._refuse_strangers()
        layered = as_layered(self.optimizer)
        if self.on_disk is not None:
            self._require_layered(layered)
        if isinstance(layered, str):
            return WholeUpdate(self.optimizer, self.layers, held)
        return LayeredUpdate(
            layered,
            {layer.index: layer for layer in self.layers},
            {x.index: [n for n, p in x.masters.items() if p in held] for x in self.layers},
            self.on_disk,
        )

    def close(self, *, is_whole: bool = True) -> None:
        """Let state on disk reach the disk, see `StateOnDisk.close`. Idempotent."""
        if self.on_disk is not None:
            self.on_disk.close(is_whole=is_whole)

    def _require_layered(self, layered: Layered | str) -> None:
        if isinstance(layered, str):
            raise ConfigError(
                "optim_state_dir: the optimizer needs the state of all layers at once: "
                f"{layered}\nhint: roundpipe.optim.AdamW(model.optim_parameters())"
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
        raise ConfigError(
            f"the optimizer does not hold master weights but {what} "
            f"({len(strangers)} of its {len(held)} parameters)\n"
            f"hint: {masters_hint(self.optimizer)}"
        )


def masters_hint(optimizer: Optimizer) -> str:
    """The line that makes such an optimizer over master weights."""
    kind = type(optimizer)
    module = kind.__module__.rpartition(".")[0] or kind.__module__
    module = "roundpipe.optim" if kind.__name__ in optim.__all__ else module
    lr = float(optimizer.param_groups[0].get("lr", 1e-3))
    return f"{module}.{kind.__name__}(model.optim_parameters(), lr={lr})"


class LayeredUpdate:
    """One step's updates, layer by layer, in any order of layers.

    Layers may be updated from one thread while the caller's thread prepares the next step.
    """

    def __init__(
        self,
        optimizer: Layered,
        layers: Mapping[int, HostLayer],
        parameters: Mapping[int, Sequence[str]],
        on_disk: StateOnDisk | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._on_disk = on_disk
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
        once the layer is done, further calls do nothing. Blocks while somebody reads the layer, and
        where state is on disk until the layer's has been read; raises what `StateOnDisk` raises.
        """
        left = self._left.get(index)
        if left is None:
            return
        layer = self._layers[index]
        layer.wait_unread()
        gradients = layer.take_gradients()
        if self._on_disk is not None and not gradients.keys().isdisjoint(left):
            self._on_disk.bring(index)
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
        if self._on_disk is not None:
            self._on_disk.leave(index, published=publish)
