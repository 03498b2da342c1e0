"""The actions of the host: add up partial gradients, take norms, update layers, publish them.

[Note: commit] A step commits in its first update, which the host stream reaches only after every
norm. Until then no master weight, moment or working weight has changed, so giving the step up costs
nothing. After it the updates run to their end: one that fails is gone on with, not taken back.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from roundpipe.engine.transfer import partial_layers
from roundpipe.errors import StepError
from roundpipe.optim.clip import clip_coefficient, layer_norms, total_norm
from roundpipe.optim.host import LayeredUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.engine.run import Run
    from roundpipe.optim.whole import WholeUpdate
    from roundpipe.plan.actions import Action
    from roundpipe.store.layer import HostLayer


def merge_partials(
    run: Run,
    layers: Sequence[HostLayer],
    action: Action,
    partials: dict[tuple[int, int], Tensor],
) -> None:
    """``M``: add up, in the order of visits, what came for owners whose last gradient is there."""
    schedule = run.program.schedule
    found: dict[int, dict[str, list[Tensor]]] = {owner: {} for owner in schedule.owners[action]}
    for number in schedule.addends[action]:
        for index in partial_layers(run, schedule.visits[number]):
            if (number, index) not in partials:
                continue
            names = run.received[number, index]
            for owner, name, view in layers[index].partials(names, partials[number, index]):
                if owner in found:
                    found[owner].setdefault(name, []).append(view)
    for owner, by_name in found.items():
        layers[owner].add_partials_(by_name)


class Update:
    """One step's update of the host's layers; what ``StepResult`` asks.

    ``scale`` multiplies all gradients first (calls of one step that each divided by their own
    tokens); ``max_norm`` clips after it. ``publish``: working weights are written at once (exact).
    """

    def __init__(
        self,
        layers: Sequence[HostLayer],
        optimizer: LayeredUpdate | WholeUpdate | _Function,
        *,
        max_norm: float | None,
        scale: float = 1.0,
        publish: bool,
    ) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._scale = scale
        self._publish = publish
        self._norms: dict[int, Tensor] = {}
        self._grad_scale: Tensor | None = None
        # Layers whose update is still to come; None: not committed.
        self._left: list[int] | None = None
        self._is_whole_begun = False  # an optimizer that steps as a whole was called
        self.grad_norm: Tensor | None = None
        self.skipped = False
        self.known = threading.Event()  # set when the step has committed or was skipped
        self.failure: BaseException | None = None

    @classmethod
    def by_hand(
        cls,
        layers: Sequence[HostLayer],
        function: Callable[[], object],
        *,
        max_norm: float | None,
        scale: float = 1.0,
    ) -> Update:
        """A whole update now, in this thread: gradients into masters' ``.grad``, call, publish.

        All gradients must be on the host. Blocks until the working weights are written.
        """
        update = cls(
            layers, _Function(layers, function), max_norm=max_norm, scale=scale, publish=True
        )
        order = [layer.index for layer in layers if layer.trainable]
        for layer in order:
            update.norm(layer)
        if not order:
            update.nothing_to_do()
        for layer in order:
            update.update(layer, order)
        return update

    @property
    def is_committed(self) -> bool:
        """Whether the step's updates have begun, or were skipped: a gradient is not finite."""
        return self._left is not None

    @property
    def is_layered(self) -> bool:
        """Whether layers are updated one by one; else all of them at the first."""
        return isinstance(self._optimizer, LayeredUpdate)

    @property
    def is_half_done(self) -> bool:
        """Whether some layers are updated and some are not."""
        return bool(self._left)

    def norm(self, layer: int) -> None:
        """``N``: the norms of one layer's gradients."""
        host = self._layers[layer]
        gradients = (host.gradient(name) for name in host.trainable)
        self._norms[layer] = layer_norms(g for g in gradients if g is not None)

    def update(self, layer: int, order: Sequence[int]) -> None:
        """``S``: update one layer; the first one of the step commits it."""
        if self._left is None:
            self._commit(order)
        assert self._left is not None
        if self.skipped:
            self._layers[layer].clear_gradients()
        elif isinstance(self._optimizer, LayeredUpdate):
            self._optimizer.update_layer(layer, grad_scale=self._grad_scale, publish=self._publish)
        elif not self._is_whole_begun:  # an optimizer that steps as a whole: at the first layer
            self._is_whole_begun = True
            self._optimizer.update_whole(grad_scale=self._grad_scale, publish=self._publish)
            self._left.clear()
        if layer in self._left:
            self._left.remove(layer)

    def nothing_to_do(self) -> None:
        """The step has no layer to update."""
        self._commit(())

    def finish(self) -> None:
        """Go on with a committed step whose update failed, until all layers have one version.

        Raises what fails again, and StepError for an optimizer that steps as a whole: nobody knows
        how far it came.
        """
        if self._left and self._is_whole_begun:
            raise StepError("an optimizer that steps as a whole failed in its step")
        for layer in list(self._left or ()):
            self.update(layer, ())

    def fail(self, error: BaseException) -> None:
        """Let whoever reads the result see ``error``, unless the step has committed."""
        if not self.known.is_set():
            self.failure = error
            self.known.set()

    def _commit(self, order: Sequence[int]) -> None:
        total = total_norm([self._norms[layer] for layer in sorted(self._norms)])
        if self._scale != 1.0:
            total = total * self._scale
        self.grad_norm = total
        self.skipped = not bool(torch.isfinite(total))
        scale = None
        if self._max_norm is not None and not self.skipped:
            scale = clip_coefficient(total, self._max_norm)
        if self._scale != 1.0:
            scale = torch.tensor(self._scale) * (1.0 if scale is None else scale)
        self._grad_scale = scale
        self._left = list(order)
        self.known.set()


class _Function:
    """A user's function in an optimizer's place."""

    def __init__(self, layers: Sequence[HostLayer], function: Callable[[], object]) -> None:
        self._layers = layers
        self._function = function

    @torch.no_grad()
    def update_whole(self, *, grad_scale: Tensor | None = None, publish: bool = True) -> None:
        """Call the function with gradients in place, then publish what it made of the masters."""
        assert publish
        for layer in self._layers:
            for name, gradient in layer.take_gradients().items():
                master = layer.masters[name]
                gradient = gradient.to(master.dtype)  # noqa: PLW2901
                master.grad = gradient if grad_scale is None else gradient * grad_scale
        try:
            with torch.enable_grad():
                self._function()
        finally:
            for layer in self._layers:
                for master in layer.masters.values():
                    master.grad = None
                layer.clear_gradients()
        for layer in self._layers:
            layer.publish()


class StepResult:
    """What became of a step. Reading a field blocks until the step has committed.

    Raises what made the step fail, as StepError.
    """

    def __init__(self, update: Update, engine: Waits | None = None) -> None:
        self._update = update
        self._engine = engine

    def __repr__(self) -> str:
        if not self._update.known.is_set():
            return "StepResult(under way)"
        return f"StepResult(grad_norm={self._update.grad_norm}, skipped={self._update.skipped})"

    @property
    def is_known(self) -> bool:
        """Whether reading a field would return at once."""
        return self._update.known.is_set()

    @property
    def grad_norm(self) -> Tensor:
        """Global 2-norm of all gradients before clipping, a 0-d fp32 tensor on the host."""
        self._wait()
        assert self._update.grad_norm is not None
        return self._update.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated because the norm is not finite."""
        self._wait()
        return self._update.skipped

    def _wait(self) -> None:
        if self._engine is not None:
            self._engine.watch(self._update.known)
        if self._update.failure is not None:
            raise StepError(f"the step failed: {self._update.failure}") from self._update.failure


class Waits(Protocol):
    """Whoever can wait and notice that nothing goes on."""

    def watch(self, ready: threading.Event) -> None:
        """Block until ``ready`` is set; raises StallError when nothing finishes."""
        ...
