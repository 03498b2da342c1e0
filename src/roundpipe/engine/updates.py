"""What the optimizer does in a step: take norms, commit, update layers.

[Note: commit] A step commits in its first update, which the host stream reaches only after every
norm. Until then no master weight, moment or working weight has changed, so giving the step up costs
nothing. After it the updates run to their end: one that fails is gone on with, not taken back.

[Note: eager] An eager step never commits as a whole: each layer is updated as soon as its own
gradient is there. So nothing may depend on all gradients: no clipping, no step that is skipped. A
failure while some layers are updated and others' gradients are still to come leaves them mixed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from roundpipe.engine.step_function import StepFunction
from roundpipe.errors import ConfigError, StepError
from roundpipe.optim.clip import clip_coefficient, layer_norms, total_norm
from roundpipe.optim.host import LayeredUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.optim.scaler import GradScaler
    from roundpipe.optim.whole import WholeUpdate
    from roundpipe.store.layer import HostLayer


def refuse_eager(
    *, max_norm: float | None, is_layered: bool, scaler: GradScaler | None = None
) -> None:
    """Raise ConfigError for what an eager step cannot do: see [Note: eager]."""
    because = "updates layers before all gradients are known, so it cannot"
    if max_norm is not None:
        raise ConfigError(
            f"commit='eager' {because} clip their norm: max_grad_norm={max_norm}\n"
            "hint: leave out commit, or max_grad_norm=None"
        )
    if scaler is not None and scaler.is_enabled():
        raise ConfigError(
            f"commit='eager' {because} skip a step that overflows: grad_scaler\n"
            "hint: leave out commit, or train in bf16 without grad_scaler"
        )
    if not is_layered:
        raise ConfigError(
            "commit='eager' needs an optimizer that updates layer by layer\n"
            "hint: leave out commit, or use one of roundpipe.optim"
        )


class LossScale:
    """What a step's losses are multiplied by: the scaler's scale after the step before.

    Read when the first loss is there. At staleness 0 the weights it was computed with have waited
    for that step's commit, so reading never waits. At staleness 1 forward runs ahead of it; the
    fused stage waits until the norm of the step before is known.
    """

    def __init__(self, scaler: GradScaler, before: Update | None) -> None:
        self._scaler, self._before = scaler, before

    def read(self) -> float:
        """Block until the step before has committed or failed; the scale from then on."""
        if self._before is not None:
            self._before.known.wait()
        return self._scaler.get_scale()


class Update:
    """One step's update of the host's layers; what ``StepResult`` asks.

    ``scale`` multiplies all gradients first (calls of one step that each divided by their own
    tokens), ``scaler`` divides them by its scale; ``max_norm`` clips after both. ``publish``:
    working weights are written at once (exact). ``is_eager``: see [Note: eager].
    """

    def __init__(  # noqa: PLR0913 - all that a step may be asked for
        self,
        layers: Sequence[HostLayer],
        optimizer: LayeredUpdate | WholeUpdate | StepFunction,
        *,
        max_norm: float | None,
        scale: float = 1.0,
        publish: bool,
        scaler: GradScaler | None = None,
        is_eager: bool = False,
    ) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._max_norm, self._scaler = max_norm, scaler
        self._scale = scale
        self._publish = publish
        self.is_eager = is_eager
        if is_eager:
            refuse_eager(max_norm=max_norm, is_layered=self.is_layered, scaler=scaler)
        self._norms: dict[int, Tensor] = {}
        self._grad_scale: Tensor | None = None
        # Layers whose update is still to come; None: none has begun.
        self._left: list[int] | None = None
        self._is_whole_begun = False  # an optimizer that steps as a whole was called
        self.grad_norm: Tensor | None = None
        self.skipped = False
        self.known = threading.Event()  # set when the norm is: committed, or skipped
        self.failure: BaseException | None = None

    @classmethod
    def by_hand(
        cls,
        layers: Sequence[HostLayer],
        function: Callable[[], object],
        *,
        max_norm: float | None,
        scale: float = 1.0,
        scaler: GradScaler | None = None,
        publish: bool = True,
    ) -> Update:
        """A whole update now, in this thread: gradients into masters' ``.grad``, call, publish.

        All gradients must be on the host. Blocks until the working weights are written. Where
        ``scaler`` does not skip a step that overflows the function may: it is called all the same.
        """
        whole = StepFunction(layers, function)
        update = cls(layers, whole, max_norm=max_norm, scale=scale, publish=publish, scaler=scaler)
        update.run([layer.index for layer in layers if layer.trainable])
        return update

    def run(self, order: Sequence[int]) -> None:
        """All of it now, in this thread: norms, commit, updates. Gradients must be there."""
        for layer in order:
            self.norm(layer)
        if not order:
            self.nothing_to_do()
        for layer in order:
            self.update(layer, order)

    @property
    def is_committed(self) -> bool:
        """Whether updates have begun, or were skipped because a gradient is not finite."""
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
        """``S``: update one layer; the first one of the step commits it, unless it is eager."""
        if self._left is None:
            self._begin(order)
        assert self._left is not None
        if self.is_eager and layer not in self._norms:
            self.norm(layer)
        if self.skipped and not self._is_told_of_overflow():
            self._layers[layer].clear_gradients()
        elif isinstance(self._optimizer, LayeredUpdate):
            self._optimizer.update_layer(layer, grad_scale=self._grad_scale, publish=self._publish)
        elif not self._is_whole_begun:  # an optimizer that steps as a whole: at the first layer
            self._is_whole_begun = True
            self._optimizer.update_whole(grad_scale=self._grad_scale, publish=self._publish)
            self._left.clear()
        if layer in self._left:
            self._left.remove(layer)
        if self.is_eager and not self._left:
            self._tell()

    def _is_told_of_overflow(self) -> bool:
        """Whether what updates looks at gradients that are not finite itself: a function may."""
        if not isinstance(self._optimizer, StepFunction) or self._scaler is not None:
            return False
        self._optimizer.is_finite = False
        return not self._is_whole_begun

    def nothing_to_do(self) -> None:
        """The step has no layer to update."""
        self._begin(())
        if self.is_eager:
            self._tell()

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

    def _begin(self, order: Sequence[int]) -> None:
        """Commit, or where that is eager start without."""
        if self._scaler is not None:
            self._scale *= 1.0 / self._scaler.get_scale()
        scale = None if self._scale == 1.0 else torch.tensor(self._scale, device="cpu")
        if not self.is_eager:
            total = self._total()
            self.skipped = not bool(torch.isfinite(total))
            if self._max_norm is not None and not self.skipped:
                clip = clip_coefficient(total, self._max_norm)
                scale = clip if scale is None else scale * clip
        self._grad_scale = scale
        self._left = list(order)
        if self._scaler is not None:
            self._scaler.count(is_finite=not self.skipped)
        if not self.is_eager:
            self._tell()

    def _total(self) -> Tensor:
        """The norm of all gradients, as they are to be used but for clipping."""
        total = total_norm([self._norms[layer] for layer in sorted(self._norms)])
        return total if self._scale == 1.0 else total * self._scale

    def _tell(self) -> None:
        self.grad_norm = self._total()
        self.known.set()


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
