"""`RoundPipe`: the object users hold. It joins the parts and adds no mechanism of its own."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.chain import Chain
from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.call import (
    LossRule,
    ask_forward,
    ask_training,
    put_whole_loss,
    total_loss,
)
from roundpipe.engine.caller import CallerState
from roundpipe.engine.engine import Engine
from roundpipe.engine.graph import Given, outputs_in_graph
from roundpipe.engine.microbatch import joined
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.random import pass_seed
from roundpipe.engine.run import Call
from roundpipe.engine.updates import StepResult, Update
from roundpipe.errors import ConfigError, ModelError, RoundPipeError
from roundpipe.models.choose import spec_for
from roundpipe.optim.host import HostOptimizer
from roundpipe.planner import Planner
from roundpipe.store.build import build_store, relayout
from roundpipe.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.engine.microbatch import Microbatch
    from roundpipe.plan.timeline import Timeline
    from roundpipe.planner import ScheduleMaker
    from roundpipe.sim.search import Plan

logger = logging.getLogger(__name__)


class RoundPipe(Stored):
    """Train a model whose weights, gradients and optimizer state stay in host memory.

    ``model``: an ``nn.Sequential`` (its children are the layers), a Hugging Face causal LM (split
    by structure, wrapped in ``peft`` or not), or any other module (one layer), on the CPU. Its
    tensors move into host segments; it must not be run or changed by hand afterwards.

    ``devices``: ``"auto"`` (every GPU, else one CPU device), a number, ``"cuda:0"``, ``"cpu*3"`` or
    a list of these; ``pool``: a ``DevicePool`` in place of it. ``optim_dtype``: of master weights
    and moments; None is fp32 for 16-bit parameters. ``schedule``: a name that
    ``roundpipe.sim.search.choose`` knows, or a function (costs, machine, microbatches) that returns
    a ``Schedule``. ``loss_reduction``: ``"sum"``, ``"mean"`` or ``"token_mean"``, see
    ``forward_backward``. ``device_memory_limit``: bytes a device may hold.
    ``seed``: of dropout and the like; None takes torch's. ``stall_seconds``: how long nothing may
    finish before a step is given up.

    Raises ModelError for a model that cannot be split exactly and DeviceError for a device that
    cannot be used. ``close`` or ``with`` ends it; wrapping a module again closes the first wrapper.
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
        seed: int | None = None,
        stall_seconds: float = 600.0,
    ) -> None:
        if isinstance(model, RoundPipe):
            raise ModelError("the model is wrapped already\nhint: use it as it is")
        if pool is not None and pool.is_closed:
            raise ConfigError("the pool is closed\nhint: make a new DevicePool")
        if pin_model not in ("alloc", "register", "off"):
            raise ConfigError(f"pin_model must be 'alloc', 'register' or 'off': {pin_model!r}")
        super().__init__(model)
        self.name = name or type(model).__name__
        self._config = model_run_config
        self._spec = spec_for(model)
        self._pool = pool or DevicePool(devices)
        with ExitStack() as undo:  # a notebook keeps what failed alive, and its threads with it
            if pool is None:
                undo.callback(self._pool.close)
            self._layers = build_store(
                [layer.tensors for layer in self._spec.layers],
                names=[layer.name for layer in self._spec.layers],
                optim_dtype=optim_dtype,
            )
            self._engine = Engine(self._pool, self._spec, self._layers, stall_seconds=stall_seconds)
            limit = device_memory_limit
            self.planner = Planner(
                self._spec, self._layers, self._pool, schedule=schedule, memory_limit=limit
            )
            self._chain = Chain(self._engine, self.planner)
            undo.pop_all()
        self._reduction, self._seed = loss_reduction, seed
        self._num_calls, self._num_passes = itertools.count(), itertools.count()  # no gradient
        self._optimizers: weakref.WeakKeyDictionary[Any, HostOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._closer = weakref.finalize(self, _close, self._engine, None if pool else self._pool)
        self._closer.atexit = False  # devices have ended by then

    # ---- calls

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """Run forward and backward of one batch; gradients add up on the host until ``step``.

        ``loss_fn(outputs, labels)`` returns one microbatch's loss; without it a causal LM's own
        loss is used, ``labels`` among ``input_kwargs``. Losses are summed where ``num_microbatch``
        is given, else averaged by samples; a causal LM's own loss is the mean over the trained
        tokens of the whole step. ``loss_reduction`` says otherwise. Returns the loss, 0-d, or
        (loss, outputs).

        Blocks until every microbatch's loss is on the host; backward goes on. Raises StepError if
        an action failed, of this step or of one before: then the state is that of the last
        committed step.
        """
        self._ready()
        config = run_config.over(self._config)
        kwargs = dict(input_kwargs or {})
        asked = ask_training(
            input_args,
            kwargs,
            label,
            loss_fn,
            LossRule(
                num_microbatch=config.num_microbatch,
                reduction=self._reduction,
                divisor=self._chain.making.divisor,
                computes_loss=self._spec.computes_loss,
                takes_num_items=self._spec.takes_num_items,
            ),
        )
        self._chain.making.check(asked)
        call = self._call(asked.microbatches, config, loss=asked.loss, keep_outputs=return_outputs)
        # Memory made in a caller's inference mode could not be written to outside it, ever.
        with torch.inference_mode(False), self._chain.interruptible():
            run = self._chain.start_training(call, config)
            self._engine.wait_results(run)
            self._chain.making.count(asked)
        loss = asked.reported(total_loss(run.losses))
        loss = loss.to(config.output_device or "cpu")
        if not return_outputs:
            return loss
        if loss_fn is None and config.merge_output is not False:
            run.outputs[0].loss = loss  # each has its share
        return loss, joined(run.outputs, config)

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """Run the model and return what it returns for the whole batch.

        Under autograd, where anything is trained or an argument wants a gradient, the result is
        part of the caller's graph: ``backward()`` from it runs backward over the devices, adds to
        the gradients on the host as ``forward_backward`` does, and gives the arguments theirs. That
        takes the inputs of all stages in host memory until then, and is slower than
        ``forward_backward``, which runs forward, loss and backward of the last layers at once. Else
        it uses the newest weights.

        Waits for everything before it. A causal LM's loss, given ``labels``, is the mean over the
        batch's trained tokens. ``backward()`` raises ConfigError if the weights were updated since.
        """
        self._ready()
        config = roundpipe_run_config.over(self._config)
        self.synchronize()
        given = Given.of(args, kwargs)
        is_joined = torch.is_grad_enabled() and config.requires_grad is not False
        is_joined = is_joined and (self._trains() or bool(given.leaves))
        with_loss = self._spec.computes_loss and kwargs.get("labels") is not None
        rule = LossRule(
            num_microbatch=config.num_microbatch,
            reduction="token_mean",
            computes_loss=with_loss,
            takes_num_items=self._spec.takes_num_items,
        )
        asked = ask_forward(given.args, given.kwargs, rule)
        if is_joined:
            outputs = self._joined_to_graph(asked.microbatches, config, given)
        else:
            outputs = self._without_graph(asked.microbatches, config)
        if asked.loss is not None and config.merge_output is not False:
            put_whole_loss(outputs, asked.loss)
        return joined(outputs, config)

    def _without_graph(self, parts: Sequence[Microbatch], config: RoundPipeRunConfig) -> list[Any]:
        call = self._call(parts, config, newest=self._chain.staleness == 1)
        with torch.inference_mode(False), self._chain.interruptible():
            run = self._chain.start_forward(call, config)
            self._engine.wait_results(run)
            self._engine.drain()
        return run.outputs

    def _joined_to_graph(
        self, parts: Sequence[Microbatch], config: RoundPipeRunConfig, given: Given
    ) -> list[Any]:
        call = self._call(parts, config, is_training=True, keep_outputs=True)
        with self._chain.interruptible():
            forward = self._chain.run_differentiable(call, config, given.wanted)
        sizes = [part.num_samples for part in parts]

        def backward(gradients: list[list[Tensor | None]]) -> Sequence[Tensor | None]:
            self._ready()
            with torch.inference_mode(False), self._chain.interruptible():
                found = self._chain.run_backward(forward, gradients)
            return given.gradients(found, sizes)

        return outputs_in_graph(forward.run.outputs, given.leaves, backward)

    def step(
        self,
        step_fn_or_optimizer: Any,
        is_async: bool = False,
        *args: Any,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Update the weights with the gradients of the calls since the last step, and clear them.

        An optimizer over ``optim_parameters()``: ``roundpipe.optim.AdamW`` updates layer by layer,
        the layers that the next step needs first being first; any other ``torch.optim`` optimizer
        as a whole. ``max_grad_norm`` clips the global norm. ``is_async``: the next call still uses
        the weights of this one (staleness 1). A step whose norm is not finite is skipped.

        Returns at once; reading a field of the result waits. A function is called with ``*args``
        when all gradients are on the host, in ``.grad`` of ``optim_parameters()``.
        """
        self._ready()
        if not self._chain.making.runs:
            raise ConfigError("nothing to step with\nhint: call forward_backward(...) first")
        if not isinstance(step_fn_or_optimizer, torch.optim.Optimizer):
            function = functools.partial(step_fn_or_optimizer, *args, **kwargs)
            return StepResult(self._chain.step_by_hand(function, max_norm=max_grad_norm))
        host = self._optimizers.get(step_fn_or_optimizer)
        if host is None:
            host = HostOptimizer(step_fn_or_optimizer, self._layers)
            self._optimizers[step_fn_or_optimizer] = host
        update = Update(
            self._layers,
            host.begin(),
            max_norm=max_grad_norm,
            scale=self._chain.making.token_scale,
            publish=not is_async,
        )
        with torch.inference_mode(False), self._chain.interruptible():
            if is_async:
                for layer in self._layers:
                    layer.split_masters()
            self._chain.step(update, is_async=is_async)
        return StepResult(update, self._engine)

    def synchronize(self) -> None:
        """Block until nothing is under way; raises what failed since the last call.

        Takes over what was changed in ``requires_grad``; after a change the next call reads the
        newest weights, whatever the staleness.
        """
        self._engine.drain()
        self._chain.notice_recovery()
        with torch.inference_mode(False):
            if relayout(self._layers):
                for layer in self._layers:  # all have one version again: the newest
                    layer.publish()
                self._chain.restart()

    def close(self) -> None:
        """Finish what is under way, publish the newest weights and free devices and threads.

        The wrapped module stays usable, with the newest weights. What hangs is left behind after a
        few seconds. Idempotent.
        """
        if "_closer" not in self.__dict__ or not self._closer.alive:
            return
        try:
            self._engine.drain(patient=False)
        except RoundPipeError:
            logger.exception("closing %s", self.name)
        finally:
            self._closer()
            self.disown()

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

    # ---- inside

    def _ready(self) -> None:
        if not self._closer.alive or self._pool.is_closed:
            raise ConfigError(f"{self.name} is closed\nhint: wrap the model again")
        self._engine.raise_failure()
        self._chain.notice_recovery()
        changed = self._spec.changed_since_wrapping()
        if changed is not None:
            raise ModelError(
                f"the module was changed after it was wrapped: {changed}\n"
                "hint: close() the RoundPipe, change the module, wrap it again"
            )

    def _trains(self) -> bool:
        return any(layer.trainable for layer in self._layers)

    def _call(
        self,
        parts: Sequence[Microbatch],
        config: RoundPipeRunConfig,
        *,
        is_training: bool = False,
        **more: Any,
    ) -> Call:
        seed = torch.initial_seed() if self._seed is None else self._seed
        # What training draws must not hang on how often one has evaluated.
        trains = is_training or "loss" in more
        return Call(
            microbatches=parts,
            caller=CallerState.capture(),
            seed=seed if trains else pass_seed(seed),
            step=next(self._num_calls if trains else self._num_passes),
            recompute_by_layer=config.recompute_grain == "layer",
            **more,
        )


def _close(engine: Engine, pool: DevicePool | None) -> None:
    """End what a RoundPipe held; a dropped one's in whatever thread the collector runs."""
    if threading.current_thread().name.startswith("roundpipe "):  # must not wait for itself
        threading.Thread(target=_close, args=(engine, pool), name="roundpipe's end").start()
        return
    engine.close()
    if pool is not None:
        pool.close()
