"""`AutoRoundPipe`: a model that is no chain, its heavy submodules each a `RoundPipe`.

Parts run on devices, what is between them on the host, for each microbatch by itself; see
`roundpipe.engine.lockstep`, and `roundpipe.wrapping.outside` for the weights that no part owns.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.lockstep import run_together
from roundpipe.engine.microbatch import Cut, config_of_call, joined, split
from roundpipe.engine.random import layer_seed
from roundpipe.engine.step_function import StepFunction
from roundpipe.engine.updates import StepResult, Update
from roundpipe.engine.whole_loss import weigh_losses
from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.changes import TreeWatch
from roundpipe.models.choose import is_causal_lm, is_of_transformers
from roundpipe.models.outer import Outer
from roundpipe.models.refusals import refuse_unsupported
from roundpipe.optim.host import HostOptimizer
from roundpipe.optim.whole import WholeUpdate
from roundpipe.store.pages import HostPages
from roundpipe.stored import Stored
from roundpipe.wrapped import with_masters
from roundpipe.wrapping.outside import Outside
from roundpipe.wrapping.part_pipe import PartPipe, Turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.engine.lockstep import Ask, Request
    from roundpipe.engine.microbatch import Microbatch
    from roundpipe.engine.pool import DevicePool
    from roundpipe.models.parts import Part
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.roundpipe import RoundPipe

logger = logging.getLogger(__name__)

_OF_PARTS = -2  # in place of a step, where a seed is made of a part's number


class AutoRoundPipe(Stored):
    """What `wrap_model_to_roundpipe` makes of a model that is no chain.

    ``model(…)`` returns what the model returns, in the caller's graph: make a loss of it, call its
    ``backward()``, then ``step``. There is no ``forward_backward`` and no ``generate``. A batch is
    cut as by ``RoundPipe``. ``parts``: the wrapped submodules by name. ``close`` or ``with`` ends
    it. Raises ModelError, naming the part, for what cannot be run exactly.
    """

    def __init__(  # noqa: PLR0913 - what all parts are made with
        self,
        model: nn.Module,
        parts: Sequence[Part],
        pool: DevicePool,
        *,
        owns_pool: bool,
        overrides: Mapping[nn.Module, RoundPipeRunConfig],
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        name: str | None = None,
        optim_dtype: torch.dtype | None = None,
        pin_model: str = "alloc",
        grad_scaler: GradScaler | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        refuse_unsupported(model)
        super().__init__(model)
        self.name = name or type(model).__name__
        self._config, self._seed = model_run_config, seed
        self._pool, self._owns_pool = pool, owns_pool
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        if self._scaler is not None:
            self._scaler.work_alone()
        self._turns, self._num_recovered = Turns(), 0
        self._places = list(parts)
        self._pipes: list[PartPipe] = []
        settings |= {"pool": pool, "optim_dtype": optim_dtype, "pin_model": pin_model}
        pages = HostPages() if pin_model == "off" else pool.pages
        self._outside = Outside(model, parts, optim_dtype=optim_dtype, pages=pages)
        try:
            for part in parts:
                config = _how_it_runs(overrides.get(part.module), model_run_config)
                self._pipes.append(
                    PartPipe.of(part, model, self._turns, model_run_config=config, **settings)
                )
        except BaseException:
            for pipe in self._pipes:
                pipe.close()
            self.disown()
            raise
        self._inside = [layer for pipe in self._pipes for layer in pipe.host_layers]
        self._layers = [*self._outside.layers, *self._inside]
        self._chain: Any = _Chains(self._pipes)
        self._is_closed = False
        self._look_again()
        self._is_made = True
        logger.info(
            "%s runs in %d parts; what is between them runs on the host: %s",
            self.name,
            len(parts),
            ", ".join(self.parts),
        )

    @property
    def parts(self) -> dict[str, RoundPipe]:
        """The wrapped submodules by their names in the model."""
        return {p.name: pipe for p, pipe in zip(self._places, self._pipes, strict=True)}

    # ---- calls

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """Run the model and return what it returns for the whole batch, in the caller's graph.

        Each microbatch goes through the model's own forward; parts run on devices, for all of them
        at once. Losses (tensors without dimension) are averaged by samples; a model of transformers
        that is given labels reports the mean over the batch's trained tokens. Waits for everything
        before it. Raises StepError if a part failed: the gradients of the step in making are gone
        then.
        """
        self._ready()
        config = config_of_call(roundpipe_run_config, self._config)
        if self._takes_cache and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        microbatches = split(args, kwargs, None, Cut(config.num_microbatch, config.split_input))
        self._begin(len(microbatches))
        has_grad = torch.is_grad_enabled() and config.requires_grad is not False
        with torch.set_grad_enabled(has_grad):
            works = [
                functools.partial(self._run_outer, at, microbatch)
                for at, microbatch in enumerate(microbatches)
            ]
            outputs = run_together(works, self._serve)
            weigh_losses(
                outputs,
                [microbatch.num_samples for microbatch in microbatches],
                self._labels(microbatches),
                is_shifted=is_causal_lm(self.model),
            )
            return joined(outputs, config)

    def forward_backward(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError: forward, loss and backward of the last layers are not known here."""
        raise ConfigError(
            "forward_backward needs a model that is one chain of layers\n"
            "hint: loss_fn(model(x), y).backward(), then model.step(optimizer)"
        )

    def generate(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError: the model's own would run on the host."""
        raise ConfigError(
            "generate would run the wrapped model on the host\n"
            "hint: close() first, then model.generate(…) of the module itself"
        )

    def save_checkpoint(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError: checkpoints are of models that are one chain of layers."""
        raise ConfigError(
            "save_checkpoint needs a model that is one chain of layers\n"
            "hint: torch.save((model.state_dict(), optimizer.state_dict()), path)"
        )

    def load_checkpoint(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError: as `save_checkpoint`."""
        raise ConfigError(
            "load_checkpoint needs a model that is one chain of layers\n"
            "hint: model.load_state_dict(…), then optimizer.load_state_dict(…)"
        )

    def step(
        self,
        step_fn_or_optimizer: Any,
        is_async: bool = False,
        *args: Any,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Update all weights with the gradients since the last step, and clear them.

        As ``RoundPipe.step``, of parts and of what stays on the host together; blocks until it is
        done. The next call reads the new weights, ``is_async`` or not: it would have to wait.
        """
        self._ready()
        self.synchronize()
        self._outside.take_gradients()
        layers, order = self._layers, [at for at, x in enumerate(self._layers) if x.trainable]
        if not any(layer.received for layer in layers):
            raise ConfigError("nothing to step with\nhint: loss.backward() first")
        optimizer: WholeUpdate | StepFunction
        if isinstance(step_fn_or_optimizer, torch.optim.Optimizer):
            HostOptimizer(step_fn_or_optimizer, layers)  # refuses what holds no masters
            groups = step_fn_or_optimizer.param_groups
            held = {parameter for group in groups for parameter in group["params"]}
            optimizer = WholeUpdate(step_fn_or_optimizer, layers, held)
        else:
            function = functools.partial(with_masters, step_fn_or_optimizer, *args, **kwargs)
            optimizer = StepFunction(layers, function)
        update = Update(
            layers, optimizer, max_norm=max_grad_norm, publish=True, scaler=self._scaler
        )
        try:
            with torch.inference_mode(False):
                update.run(order)
        finally:
            self._forget_gradients()
            self._chain.notice_load()
        return StepResult(update)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients since the last step, by name; see ``RoundPipe.gradients``."""
        self.synchronize()
        self._outside.take_gradients()
        names = self._outside.names()
        return {
            names[id(layer.tensors[name])]: gradient
            for layer in self._layers
            for name in layer.trainable
            if (gradient := layer.gradient(name)) is not None
        }

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The master weights by the names they have in the model, behind ``prefix`` and a dot."""
        masters = {
            id(layer.tensors[name]): master
            for layer in self._layers
            for name, master in layer.masters.items()
        }
        for name, parameter in self.model.named_parameters():
            if id(parameter) in masters:
                yield (f"{prefix}.{name}" if prefix else name), masters[id(parameter)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        self.synchronize()
        self._forget_gradients()

    def synchronize(self) -> None:
        """Block until nothing is under way; raises what failed since the last call.

        Takes over what was changed in ``requires_grad``.
        """
        for pipe in self._pipes:
            pipe.synchronize()
        with torch.inference_mode(False):
            self._outside.relayout()

    def close(self) -> None:
        """Free devices and threads; the module stays usable, with the newest weights."""
        if "_is_closed" not in self.__dict__ or self._is_closed:
            return
        self._is_closed = True
        for pipe in self._pipes:
            pipe.close()
        self._outside.close()
        if self._owns_pool:
            self._pool.close()
        self.disown()

    def __enter__(self) -> AutoRoundPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_changed(self) -> None:
        """Raise ModelError if the module was changed past the wrapper since it was wrapped."""
        changed = self._watch.difference()
        if changed is not None:
            raise ModelError(
                f"the module was changed after it was wrapped: {changed}\n"
                "hint: close() the AutoRoundPipe, change the module, wrap it again"
            )

    def _retake_attributes(self) -> None:
        """Run with the module's attributes as they are now."""
        for pipe in self._pipes:
            pipe._retake_attributes()
        self._look_again()

    # ---- inside

    def _look_again(self) -> None:
        self._watch = TreeWatch(self.model)
        self._outers: list[Outer] = []
        base: Any = self.model
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        forward = inspect.signature(base.forward)
        self._takes_cache = is_of_transformers(base) and "use_cache" in forward.parameters

    def _ready(self) -> None:
        if self._is_closed or self._pool.is_closed:
            raise ConfigError(f"{self.name} is closed\nhint: wrap the model again")
        for pipe in self._pipes:
            pipe.look_for_failure()
        recovered = sum(pipe.num_recovered for pipe in self._pipes)
        if recovered != self._num_recovered:  # some of the step's gradients are gone: so are all
            self._num_recovered = recovered
            self._forget_gradients()
        self._refuse_changed()

    def _begin(self, num_microbatches: int) -> None:
        """Have copies of the outer code, modes and seeds ready for a call."""
        modules = [part.module for part in self._places]
        while len(self._outers) < num_microbatches:
            self._outers.append(Outer(self.model, modules))
        for outer in self._outers[:num_microbatches]:
            outer.sync_mode()
        seed = torch.initial_seed() if self._seed is None else self._seed
        for index, pipe in enumerate(self._pipes):
            pipe.begin_call(layer_seed(seed, _OF_PARTS, index, 0))
        self._outside.guard(self._inside)

    def _run_outer(self, at: int, microbatch: Microbatch, ask: Ask) -> Any:
        outer = self._outers[at]
        outer.line.ask = ask
        return outer.module(*microbatch.inputs.args, **(microbatch.inputs.kwargs or {}))

    def _serve(self, requests: Sequence[Request]) -> Sequence[Any]:
        return self._pipes[requests[0].part].answer(requests)

    def _labels(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Labels of a model of transformers, of each microbatch; None where it is given none."""
        if not is_of_transformers(self.model):
            return None
        labels = [(microbatch.inputs.kwargs or {}).get("labels") for microbatch in microbatches]
        return None if any(label is None for label in labels) else labels  # type: ignore[return-value]

    def _forget_gradients(self) -> None:
        self._outside.forget_gradients()
        for pipe in self._pipes:
            pipe.zero_grad()


class _Chains:
    """The chains of all parts, as far as `Stored` needs them."""

    def __init__(self, pipes: Sequence[PartPipe]) -> None:
        self._pipes = pipes

    @property
    def making(self) -> _Chains:
        """The step in making."""
        return self

    @property
    def runs(self) -> bool:
        """Whether any part has run since the last step."""
        return any(pipe.has_run for pipe in self._pipes)

    def notice_load(self) -> None:
        """The weights are others."""
        for pipe in self._pipes:
            pipe.notice_new_weights()


def _how_it_runs(
    override: RoundPipeRunConfig | None, default: RoundPipeRunConfig
) -> RoundPipeRunConfig:
    """Of a part's config what is not about cutting and joining: that is done at the root."""
    grain = (override or default).recompute_grain or default.recompute_grain
    plan = override.execute_plan if override is not None else None
    return RoundPipeRunConfig(recompute_grain=grain, execute_plan=plan)
