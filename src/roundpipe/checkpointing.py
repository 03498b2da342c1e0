"""Save a run so that going on from there is as if it had never stopped, and go on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from roundpipe.checkpoint.find import require_replaceable
from roundpipe.checkpoint.layer_files import require_finite
from roundpipe.checkpoint.load import (
    open_checkpoint,
    put_back_options,
    put_back_weights,
    require_fitting,
)
from roundpipe.checkpoint.saved import SavedCheckpoint
from roundpipe.checkpoint.snapshot import Progress, require_settled, take
from roundpipe.checkpoint.write import write_checkpoint, write_model_only
from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.generating import Generating
from roundpipe.sim.candidate import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from roundpipe.checkpoint.load import Opened
    from roundpipe.checkpoint.manifest import Manifest
    from roundpipe.checkpoint.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Checkpointing(Generating):
    """A wrapper whose training can be stopped and gone on with."""

    _saving: SavedCheckpoint | None = None

    def save_checkpoint(  # noqa: PLR0913 - all that a run consists of
        self,
        folder: str | Path,
        optimizer: Optimizer | None,
        scheduler: Any = None,
        *,
        is_async: bool = False,
        only_model: bool = False,
        beside: Callable[[Path], None] | None = None,
        about: Mapping[str, Any] | None = None,
        **state: Any,
    ) -> SavedCheckpoint:
        """Write all that training needs to go on with the same bits into ``folder``.

        Between two steps. Weights lie there as stock transformers or peft loads them (of another
        module in ``model.safetensors``, by its own names), beside them masters, the optimizer's
        state, scheduler, loss scaler, random state (torch's on the CPU) and whatever is given as
        ``state``: plain values and tensors, nested. Nothing is pickled. The folder appears whole or
        not at all, in place of a checkpoint of that name; its ``manifest.json`` has the SHA-256 of
        every file, and ``about`` (JSON). ``beside`` is called once with the folder in the making,
        to write more files. ``only_model``: weights alone (nobody goes on from them), at once.

        Waits until nothing is under way. Returns when all is on the disk, or with ``is_async`` at
        once: then it is written layer by layer while training goes on, without a second copy; an
        update waits until its layer is written, and ``beside`` is called in another thread. One
        checkpoint is written at a time. Raises ConfigError in the middle of a step, for state that
        needs pickle, for a folder with other files and where the disk fails, RoundPipeError for a
        weight that is not finite; with ``is_async`` what comes up while it is written is raised by
        ``wait()`` of what is returned, or by the next save.
        """
        self._ready()
        if self._saving is not None:
            self._saving.require_told()
        about = json.loads(json.dumps(dict(about or {}), allow_nan=False))
        saved = SavedCheckpoint(Path(folder))
        require_replaceable(saved.folder)
        self._settle()
        require_settled(has_gradients=bool(self._chain.making.runs), is_mixed=self._engine.is_mixed)
        place = saved.folder.absolute()  # whatever the current folder is when it is written
        if only_model:
            require_finite(self._layers)
            weights = self.newest_weights()
            saved.run(lambda: write_model_only(place, self.model, weights, about, beside=beside))
            return saved
        if optimizer is not None:
            self._stepping.attach(optimizer)
        snapshot = self._snapshot(optimizer, scheduler, state)
        self._saving = saved

        def write() -> None:
            write_checkpoint(place, snapshot, about, beside=beside, progress=self._count_progress)
            self._engine.last_checkpoint = str(place)

        snapshot.begin()
        try:
            (saved.start if is_async else saved.run)(write)
        except BaseException:
            snapshot.end()
            raise
        return saved

    def _snapshot(
        self, optimizer: Optimizer | None, scheduler: Any, state: Mapping[str, Any]
    ) -> Snapshot:
        progress = Progress(
            staleness=self._chain.staleness,
            seed=self._seed,
            calls=self._num_calls.made,
            passes=self._num_passes.made,
            devices=len(self._pool.devices),
            plans={n: each.as_plain() for n, each in self.planner.candidates.items()},
        )
        return take(
            self.model,
            self._layers,
            progress,
            optimizer=optimizer,
            on_disk=self._stepping.on_disk,
            late={layer.index: self._chain.late_weights(layer) for layer in self._layers},
            scheduler=scheduler,
            scaler=self._stepping.scaler,
            state=state,
        )

    def _count_progress(self) -> None:
        """An update that waits for the writer is no stall while that gets on."""
        self._pool.num_finished += 1

    def _finish_saving(self, *, only_if: bool = True) -> None:
        """Wait for a checkpoint that is being written; a failure is kept for who asks."""
        saving = self._saving
        if saving is not None and only_if:
            saving.join()

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Run ``fn`` on every module of the model, as to initialise it; masters follow."""
        self._finish_saving()
        return super().apply(fn)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights by the model's own names; masters follow."""
        self._finish_saving()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def load_checkpoint(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        known: Manifest | None = None,
    ) -> dict[str, Any]:
        """Go on from what ``save_checkpoint`` has written, with the same bits; returns ``state``.

        The model must have the same parameters, trained ones and frozen ones, and ``optimizer`` the
        same class and groups; both are made as they were then. Devices may be others. Gradients
        since the last step are forgotten. Without ``optimizer`` weights alone are loaded.

        All files are read and compared with their SHA-256 first; ``known`` is what
        ``roundpipe.checkpoint.find.check`` returned for the folder: files that nobody has touched
        since are not compared again. Raises ConfigError, before anything has changed, naming the
        file that is not what was written, or what is different here; RoundPipeError where the disk
        fails later: then the weights are of two versions until a checkpoint is loaded. Blocks until
        nothing is under way and all is read.
        """
        self._finish_saving()
        self._ready()
        opened = open_checkpoint(Path(folder), known)
        self._settle()
        on_disk = self._stepping.on_disk
        if optimizer is not None:
            on_disk = self._stepping.attach(optimizer).on_disk
        others = {"scheduler": scheduler, "scaler": self._stepping.scaler}
        require_fitting(opened, self._layers, optimizer, **others)
        self._hide_gradients()
        for layer in self._layers:
            layer.clear_gradients()
        self._engine.is_mixed = True  # until all is read
        try:
            with torch.inference_mode(False):
                put_back_weights(opened, self._layers, optimizer, on_disk)
        except (ConfigError, OSError) as error:
            what = str(error).partition("\nhint:")[0]
            raise RoundPipeError(
                f"a checkpoint could not be read to its end, so the weights are mixed: {what}"
                "\nhint: load_checkpoint(…) of this one again, or of another"
            ) from error
        if optimizer is None:
            self._chain.go_on_from(0)
        else:
            for name, thing in others.items():
                if thing is not None:
                    thing.load_state_dict(opened.document[name])
            self._go_on_from(opened, optimizer)
        return opened.state

    def _go_on_from(self, opened: Opened, optimizer: Optimizer) -> None:
        """Be where training was, beside its weights."""
        for name in put_back_options(opened, optimizer):
            logger.info("the checkpoint's updates were made by another implementation: %s", name)
        progress = opened.progress
        self._seed = progress.seed
        self._num_calls.made, self._num_passes.made = progress.calls, progress.passes
        if progress.devices == len(self._pool.devices):  # else replicas would be others anyway
            self._chain.plan_again()  # other plans may have been made here, for other bits
            self.planner.like = {n: Candidate.of_plain(p) for n, p in progress.plans.items()}
        torch.set_rng_state(opened.random)
        self._chain.go_on_from(progress.staleness)
        self._engine.last_checkpoint = str(opened.folder)
