"""`RoundPipe`: the object users hold. It joins the parts and adds no mechanism of its own."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from roundpipe.chain import Chain
from roundpipe.checkpointing import Checkpointing
from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.engine import Engine
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.random import Numbering
from roundpipe.engine.updates import StepResult
from roundpipe.engine.worker import is_worker
from roundpipe.errors import ConfigError, ModelError, RoundPipeError
from roundpipe.models.choose import spec_for
from roundpipe.models.loss import check_reduction
from roundpipe.models.text_only import TextOnly
from roundpipe.planner import Planner
from roundpipe.stepping import Stepping
from roundpipe.store.build import build_store, is_changed, relayout
from roundpipe.store.frozen import packed_in
from roundpipe.store.pages import HostPages
from roundpipe.wrapped import with_masters

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig
    from torch.optim import Optimizer

    from roundpipe.optim.scaler import GradScaler
    from roundpipe.plan.timeline import Timeline
    from roundpipe.planner import ScheduleMaker
    from roundpipe.sim.search import Plan
    from roundpipe.store.frozen import Base

logger = logging.getLogger(__name__)


class RoundPipe(Checkpointing):
    """Train a model whose weights, gradients and optimizer state stay in host memory.

    ``model``: an ``nn.Sequential`` (its children are the layers), a Hugging Face causal LM (split
    by structure, wrapped in ``peft`` or not), or any other module (one layer), on the CPU. Its
    tensors move into host segments; it must not be run or changed by hand afterwards. What text
    does not reach (a vision tower) is frozen.

    ``devices``: ``"auto"`` (every GPU, else one CPU device), a number, ``"cuda:0"``, ``"cpu*3"`` or
    a list of these; ``pool``: a ``DevicePool`` in place of it. ``optim_dtype``: of master weights
    and moments; None is fp32 for 16-bit parameters. ``name``: in logs and errors.
    ``model_run_config``: what holds for calls that do not say otherwise. ``schedule``: ``"auto"``,
    ``"round_robin"``, ``"replicated"``, ``"hybrid"``, ``"gpipe"``, or a function (costs, machine,
    microbatches) that returns a ``Schedule``. ``loss_reduction``: ``"sum"``, ``"mean"`` or
    ``"token_mean"``, see ``forward_backward``. ``device_memory_limit``: bytes a device may hold.
    ``pin_model``: ``"off"`` page-locks no host memory, the two other words do, at exact size, as
    far as ``pinned_memory_limit`` (bytes) allows. ``bases``: where frozen weights lie already, as
    ``roundpipe.models.loading`` gives them. ``grad_scaler``: scales losses and unscales gradients
    by itself (fp16). ``optim_state_dir``: masters and moments live there between updates.
    ``commit="eager"`` updates a layer as soon as its own gradient is there: sooner done, but a step
    that fails leaves weights of two versions. ``seed``: of dropout and the like; None takes
    torch's. ``stall_seconds``: how long nothing may finish before a step is given up.

    Raises ModelError for a model that cannot be split exactly, DeviceError for a device that cannot
    be used, ConfigError for words that mean nothing. Weights are moved layer by layer, so memory
    never holds them twice. ``close`` or ``with`` ends it; wrapping a module again closes the first
    wrapper.
    """

    def __init__(  # noqa: PLR0913 - the published signature
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: str = "alloc",
        *,
        devices: Any = "auto",
        pool: DevicePool | None = None,
        schedule: str | ScheduleMaker = "auto",
        loss_reduction: str | None = None,
        device_memory_limit: int | None = None,
        pinned_memory_limit: int | None = None,
        bases: list[Base] | None = None,
        grad_scaler: GradScaler | None = None,
        optim_state_dir: str | Path | None = None,
        commit: str = "whole",
        seed: int | None = None,
        stall_seconds: float = 600.0,
    ) -> None:
        _require(model, pool, loss_reduction, pin_model=pin_model, commit=commit)
        super().__init__(model)
        self.name = name or type(model).__name__
        self._config = model_run_config
        self._spec = spec_for(model, packed_in(bases or []))
        self._text_only = TextOnly.of(self._spec)
        self._pool = pool or DevicePool(devices, pinned_memory_limit=pinned_memory_limit)
        with ExitStack() as undo:  # a notebook keeps what failed alive, and its threads with it
            if pool is None:
                undo.callback(self._pool.close)
            pages = HostPages() if pin_model == "off" else self._pool.pages
            self._layers = build_store(
                [layer.tensors for layer in self._spec.layers],
                names=[layer.name for layer in self._spec.layers],
                optim_dtype=optim_dtype,
                bases=bases or [],
                pages=pages,
            )
            self._engine = Engine(
                self._pool, self._spec, self._layers, stall_seconds=stall_seconds, pages=pages
            )
            limit = device_memory_limit
            self.planner = Planner(
                self._spec, self._layers, self._pool, schedule=schedule, memory_limit=limit
            )
            self._chain = Chain(self._engine, self.planner, is_eager=commit == "eager")
            undo.pop_all()
        self._reduction, self._seed, self._shown = loss_reduction, seed, []
        self._num_calls, self._num_passes = Numbering(), Numbering()  # no gradient
        self._stepping = Stepping(
            self._layers,
            synchronize=self._settle,
            scaler=grad_scaler,
            state_dir=None if optim_state_dir is None else Path(optim_state_dir),
            is_eager=commit == "eager",
        )
        self._closer = weakref.finalize(self, _close, self._engine, None if pool else self._pool)
        self._closer.atexit = False  # devices have ended by then
        self._is_made = True

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - names that Hugging Face's users know
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | str = "auto",
        quantization: Literal["nf4"] | None = None,
        peft_config: PeftConfig | None = None,
        mapped: bool | str = "auto",
        cache_folder: Path | None = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> Self:
        """Wrap a causal LM whose weights are read from safetensors straight into host segments.

        ``name_or_path``: a folder, or a model's id on the hub. ``dtype``: of the weights; "auto" as
        its files say. ``quantization="nf4"`` packs the matrices of blocks into 4 bits, which
        freezes them. ``peft_config`` adds adapters; all else is frozen then. ``mapped``: True
        leaves frozen weights on disk, in files that are written once into ``cache_folder``
        (default: below the home folder) and mapped; "auto" does so where memory has no room for
        them. ``progress`` is called with bytes done and in all. ``settings`` as for the class.

        Takes the model's size of memory, once. Blocks on the disk. Raises ConfigError for files
        that are missing, broken or of a format that is not read.
        """
        from roundpipe.models.loading.pretrained import load_pretrained  # noqa: PLC0415 (late)

        loaded = load_pretrained(
            name_or_path,
            dtype=dtype,
            quantization=quantization,
            peft_config=peft_config,
            mapped=mapped,
            cache_folder=cache_folder,
            attn_implementation=attn_implementation,
            revision=revision,
            progress=progress,
        )
        return cls(loaded.model, bases=loaded.bases, **settings)

    def attach_optimizer(self, optimizer: Optimizer, *, resume: bool = False) -> None:
        """Take over an optimizer before the first step, which does it otherwise.

        ``resume``: its state, masters and working weights come from ``optim_state_dir``, where an
        earlier run has left them. Blocks until that is read. Raises ConfigError where it is not
        whole, or of another model or optimizer.
        """
        self._ready()
        self._stepping.attach(optimizer, resume=resume)

    def step(
        self,
        step_fn_or_optimizer: Any,
        is_async: bool = False,
        *args: Any,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Update the weights with the gradients of the calls since the last step, and clear them.

        An optimizer over ``optim_parameters()``: those of ``roundpipe.optim``, and of torch's all
        that update each parameter by itself, go layer by layer, the layers that the next step needs
        first being first; others step as a whole. ``max_grad_norm`` clips the global norm.
        ``is_async``: the next call still uses the weights of this one (staleness 1). A step whose
        norm is not finite is skipped. Returns at once; reading a field of the result waits.

        A function is called with ``*args``, here and now, when all gradients are on the host, in
        ``.grad`` of ``optim_parameters()``; ``parameters()`` are those in it. Returns when it has.

        Raises ConfigError where there was no call, or for an optimizer that holds no masters.
        """
        self._ready()
        if not self._chain.making.runs:
            raise ConfigError("nothing to step with\nhint: call forward_backward(...) first")
        if not isinstance(step_fn_or_optimizer, torch.optim.Optimizer):
            self._stepping.require_function(is_async=is_async)
            function = functools.partial(with_masters, step_fn_or_optimizer, *args, **kwargs)
            made = self._chain.step_by_hand(
                function,
                max_norm=max_grad_norm,
                scaler=self._stepping.scaler,
                is_async=is_async,
            )
            return StepResult(made)
        with torch.inference_mode(False), self._chain.interruptible():
            update = self._stepping.update(
                step_fn_or_optimizer,
                max_norm=max_grad_norm,
                scale=self._chain.making.token_scale,
                is_async=is_async,
            )
            self._chain.step(update, is_async=is_async)
        return StepResult(update, self._engine)

    def synchronize(self) -> None:
        """Block until nothing is under way; raises what failed since the last call.

        The module then has the newest weights, also after a step with ``is_async=True``, whose next
        call still reads those of before. Takes over what was changed in ``requires_grad``; after
        that the next call reads the newest. Gradients of the calls since the last step are then in
        ``.grad`` of ``parameters()``.
        """
        self._settle()
        with torch.inference_mode(False):
            self._chain.show_newest()

    def _settle(self) -> None:
        self._engine.drain()
        self._notice_recovery()
        self._chain.tell_times()
        with torch.inference_mode(False):
            self._finish_saving(only_if=is_changed(self._layers))
            if relayout(self._layers):
                self._chain.catch_up()  # all layers have one version again
                self._chain.restart()
            self._hide_gradients()
            if self._chain.making.runs:
                self._show_gradients()

    def close(self) -> None:
        """Finish what is under way, publish the newest weights and free devices and threads.

        The module stays usable, with the newest weights; what hangs is left behind. Idempotent.
        """
        if "_closer" not in self.__dict__ or not self._closer.alive or sys.is_finalizing():
            return  # when Python ends, devices and most of torch have ended already
        self._finish_saving()
        try:
            self._engine.drain(patient=False)
        except RoundPipeError as error:
            if not isinstance(error.__cause__, KeyboardInterrupt):  # that one was raised already
                logger.exception("closing %s", self.name)
        try:
            self._stepping.close(is_whole=self._engine.is_whole)
        except (RoundPipeError, OSError):
            logger.exception("closing %s: its optimizer's state", self.name)
        finally:
            if found := self._closer.detach():  # called, it would do nothing once Python is ending
                _, end, arguments, _ = found
                end(*arguments)
            self.disown()
            self._hide_gradients()

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what was chosen and what ran

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training call, with the reason; None before the first."""
        return self._chain.plan

    @property
    def timeline(self) -> Timeline:
        """What ran when, of the training calls that are still remembered."""
        return self._chain.timeline()


def _require(model: nn.Module, pool: DevicePool | None, loss: str | None, **words: str) -> None:
    """Raise for what cannot be wrapped, and for words that mean nothing."""
    if isinstance(model, RoundPipe):
        raise ModelError("the model is wrapped already\nhint: use it as it is")
    if not isinstance(model, nn.Module):
        way_out = "RoundPipe.from_pretrained(…) reads a model's files"
        raise ModelError(f"not a module: {model!r:.60}\nhint: {way_out}")
    if pool is not None and pool.is_closed:
        raise ConfigError("the pool is closed\nhint: make a new DevicePool")
    known = {"pin_model": ("alloc", "register", "off"), "commit": ("whole", "eager")}
    for name, word in words.items():
        if word not in known[name]:
            raise ConfigError(f"{name} must be {' or '.join(map(repr, known[name]))}: {word!r}")
    if loss is not None:
        check_reduction(loss)


def _close(engine: Engine, pool: DevicePool | None) -> None:
    """End what a RoundPipe held; a dropped one's in whatever thread the collector runs."""
    if is_worker():  # must not wait for itself
        threading.Thread(target=_close, args=(engine, pool), name="roundpipe's end").start()
        return
    engine.close()
    if pool is not None:
        pool.close()
