"""The optimizers that step one model: what each needs of the host store, and when."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from roundpipe.engine.updates import Update
from roundpipe.errors import ConfigError
from roundpipe.optim.host import HostOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from roundpipe.optim.on_disk import StateOnDisk
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.store.layer import HostLayer

logger = logging.getLogger(__name__)


class Stepping:
    """Makes the updates of steps.

    ``state_dir``: where masters and moments are between updates. ``is_eager``: layers are updated
    as soon as their own gradient is there. ``synchronize`` blocks until nothing is under way.
    """

    def __init__(
        self,
        layers: Sequence[HostLayer],
        *,
        synchronize: Callable[[], None],
        scaler: GradScaler | None = None,
        state_dir: Path | None = None,
        is_eager: bool = False,
    ) -> None:
        self._layers = layers
        self._synchronize: Any = weakref.WeakMethod(synchronize)  # of whoever holds this
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            self.scaler.work_alone()
        self.is_eager = is_eager
        self._state_dir = state_dir
        self._has_told_cost = False
        self._host: HostOptimizer | None = None  # of the optimizer that came last
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # see `_let_wait`
        if state_dir is not None:
            for layer in layers:
                layer.start_masters_away = True

    def attach(self, optimizer: Optimizer, *, resume: bool = False) -> HostOptimizer:
        """Take an optimizer over, its state from disk if it is to resume.

        Blocks until nothing is under way where state is on disk. Raises ConfigError for one that
        does not hold masters of this model, or a second one with state on disk.
        """
        known = self._host
        if known is not None and known.optimizer is optimizer:
            if resume:
                raise ConfigError("the optimizer has made steps: it cannot resume others")
            return known
        if resume and self._state_dir is None:
            raise ConfigError("there is nothing to resume from\nhint: optim_state_dir=FOLDER")
        if self._state_dir is not None:
            if known is not None:
                raise ConfigError("optim_state_dir holds the state of one optimizer, not of two")
            self._synchronize()()
        if optimizer not in self._waiting:
            self._let_wait(optimizer)
        found = HostOptimizer(optimizer, self._layers, state_dir=self._state_dir, resume=resume)
        self._host = found
        return found

    @property
    def on_disk(self) -> StateOnDisk | None:
        """The files that masters and moments are in between updates, if they are."""
        return self._host.on_disk if self._host is not None else None

    def _let_wait(self, optimizer: Optimizer) -> None:
        """Have saving and loading an optimizer's state wait for the updates under way."""
        synchronize = self._synchronize

        def before(*_: Any) -> None:
            wait = synchronize()
            if wait is not None:
                wait()

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_pre_hook(before)
        self._waiting.add(optimizer)

    def update(
        self, optimizer: Optimizer, *, max_norm: float | None, scale: float, is_async: bool
    ) -> Update:
        """One step's update; hyperparameters are those of now."""
        host = self.attach(optimizer)
        if is_async and self.is_eager:
            raise _late_and_eager()
        update = Update(
            self._layers,
            host.begin(),
            max_norm=max_norm,
            scale=scale,
            publish=not is_async,
            scaler=self.scaler,
            is_eager=self.is_eager,
        )
        if is_async:
            for layer in self._layers:
                layer.split_masters()
        return update

    def require_function(self, *, is_async: bool) -> None:
        """Raise ConfigError where a function cannot step; say once in the log what one costs."""
        if is_async and self.is_eager:
            raise _late_and_eager()
        if not self._has_told_cost:
            self._has_told_cost = True
            logger.info(
                "a function steps when all gradients are there, and the next call waits for it; "
                "step(optimizer) updates layer by layer beside the next forward"
            )
        if self._state_dir is not None:
            raise ConfigError(
                "optim_state_dir: masters are on disk between steps, so a function cannot step "
                "them\nhint: step(optimizer)"
            )

    def close(self, *, is_whole: bool = True) -> None:
        """Let state on disk reach the disk, to be resumed from if it is whole. Idempotent."""
        if self._host is not None:
            self._host.close(is_whole=is_whole)


def _late_and_eager() -> ConfigError:
    return ConfigError("commit='eager' updates at once: is_async=True would wait a step")
