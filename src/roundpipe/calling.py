"""Calls of a model: what every call captures, and ``forward``, with a graph or without."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.call import (
    LossRule,
    ask_forward,
    ask_training,
    put_whole_loss,
    set_loss,
    total_loss,
)
from roundpipe.engine.caller import CallerState
from roundpipe.engine.compute import backward as run_backward
from roundpipe.engine.generation import refuse_cache
from roundpipe.engine.graph import Given, detached, outputs_in_graph, own_copy
from roundpipe.engine.microbatch import Cut, config_of_call, joined
from roundpipe.engine.random import Numbering, pass_seed
from roundpipe.engine.rows import require_rows
from roundpipe.engine.run import Call
from roundpipe.errors import ConfigError, ModelError, StepError
from roundpipe.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roundpipe.engine.call import Asked, LossFn
    from roundpipe.engine.engine import Engine
    from roundpipe.engine.microbatch import Microbatch
    from roundpipe.engine.pool import DevicePool
    from roundpipe.models.spec import ModelSpec
    from roundpipe.models.text_only import TextOnly
    from roundpipe.stepping import Stepping

_NAMES = frozenset(("input_args", "input_kwargs", "run_config"))


class Calling(Stored):
    """A wrapper that runs its model on devices."""

    _engine: Engine
    _spec: ModelSpec
    _text_only: TextOnly
    _config: RoundPipeRunConfig
    _seed: int | None
    _reduction: str | None
    _stepping: Stepping
    _pool: DevicePool
    _closer: Any
    _num_calls: Numbering
    _num_passes: Numbering  # without gradient

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """Run forward and backward of one batch; gradients add up on the host until ``step``.

        Tensors [batch, …] are cut into microbatches, and may be overwritten when this returns.
        ``loss_fn(outputs, labels)`` returns one microbatch's loss, or a sequence of losses that are
        all run backward from; without it a causal LM's own is used (``labels`` [batch, length],
        int64, among ``input_kwargs``), and of any other model the output is the loss. Losses are
        summed where ``num_microbatch`` or ``split_input`` is given, else averaged by samples; a
        causal LM's own is the mean over the trained tokens of the whole step. ``loss_reduction``
        says otherwise. Returns the loss, 0-d, or a list of losses, or (loss, outputs).

        Where an input wants a gradient it is run backward from too, through what made it: the
        output of another RoundPipe, for example. Then the losses are computed on the host.

        Blocks until every microbatch's loss is on the host; backward goes on. Raises ConfigError
        for a batch that cannot be cut or has no loss, StepError if an action failed, of this step
        or of one before: then the state is that of the last committed step.
        """
        self._ready()
        _refuse_tensor(input_args)
        self._text_only.check(input_args, input_kwargs)
        refuse_cache(self._spec, input_kwargs)
        config = config_of_call(run_config, self._config)
        self._require_rows(input_args, input_kwargs, config)
        # Layers read them until their backward: a caller may write to theirs when this returns.
        given, label = Given.of(input_args, dict(input_kwargs or {})), own_copy(label)
        asked = ask_training(
            given.args,
            given.kwargs,
            label,
            loss_fn,
            self._loss_rule(config),
        )
        self._chain.making.check(asked)
        train = self._train
        if torch.is_grad_enabled() and given.leaves:
            self._spec.refuse_lost_gradients(input_args, input_kwargs or {})
            train = functools.partial(self._train_through, given)
        wants_logits = return_outputs or loss_fn is not None
        losses, outputs = train(asked, config, keeps=return_outputs, wants_logits=wants_logits)
        total = asked.reported(total_loss(losses)).to(config.output_device or "cpu")
        loss = list(total.unbind()) if total.dim() else total
        if not return_outputs:
            return loss
        if asked.is_own and config.merge_output is not False:
            set_loss(outputs, total)  # each has its share
        return loss, joined(outputs, config)

    def plan_again(self) -> None:
        """Let the next step be planned as the first one was, for microbatches of another size.

        What was measured is forgotten. For after a step that did not fit: what failed is not raised
        again, where only its `StepResult` has told it so far. Blocks until nothing is under way.
        """
        with contextlib.suppress(StepError):
            self._ready()
        self._ready()
        self._settle()
        self._chain.plan_again()

    def _loss_rule(self, config: RoundPipeRunConfig) -> LossRule:
        return LossRule(
            cut=_cut(config),
            reduction=self._reduction,
            divisor=self._chain.making.divisor,
            computes_loss=self._spec.computes_loss,
            takes_num_items=self._spec.takes_num_items,
            shifts_labels=self._spec.shifts_labels,
        )

    def _train(
        self, asked: Asked, config: RoundPipeRunConfig, *, keeps: bool, wants_logits: bool
    ) -> tuple[list[Tensor | None], list[Any]]:
        """Losses, and outputs if they are to be kept."""
        scaler = self._stepping.scaler
        call = self._call(
            asked.microbatches,
            config,
            is_training=True,
            loss=asked.loss,
            keep_outputs=keeps,
            wants_logits=wants_logits,
            loss_scale=self._engine.loss_scale(scaler) if scaler is not None else None,
        )
        # Memory made in a caller's inference mode could not be written to outside it, ever.
        with torch.inference_mode(False), self._chain.interruptible():
            try:
                run = self._chain.start_training(call, config)
            except Exception:
                self._num_calls.made = call.step  # it was none
                raise
            self._engine.wait_results(run)
            self._chain.making.count(asked)
        return run.losses, run.outputs

    def _train_through(
        self, given: Given, asked: Asked, config: RoundPipeRunConfig, *, keeps: bool, **_: bool
    ) -> tuple[list[Tensor | None], list[Any]]:
        """The same where inputs want a gradient: through the caller's graph, losses on the host."""
        assert asked.loss is not None
        outputs = self._joined_to_graph(asked.microbatches, config, given, asked)
        losses = [
            asked.loss(output, part.label, at)
            for at, (output, part) in enumerate(zip(outputs, asked.microbatches, strict=True))
        ]
        scaler = self._stepping.scaler
        scale = 1.0 if scaler is None else self._engine.loss_scale(scaler).read()
        run_backward(losses, [torch.full_like(loss, scale) for loss in losses])
        return [loss.detach() for loss in losses], detached(outputs) if keeps else []

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """Run the model and return what it returns for the whole batch, on ``output_device``.

        Under autograd, where anything is trained or an argument wants a gradient, the result is
        part of the caller's graph: ``backward()`` from it runs backward over the devices, adds to
        the gradients on the host as ``forward_backward`` does, and gives the arguments theirs. That
        takes the inputs of all stages in host memory until then, and is slower than
        ``forward_backward``, which runs forward, loss and backward of the last layers at once. Else
        it uses the newest weights.

        Blocks until its outputs are on the host, and everything before it is done. A causal LM's
        loss, given ``labels``, is the mean over the batch's trained tokens. Raises as
        ``forward_backward`` does; ``backward()`` raises ConfigError if weights were updated since.
        """
        self._ready()
        args, kwargs, own = self._as_named_in_training(args, kwargs)
        self._text_only.check(args, kwargs)
        refuse_cache(self._spec, kwargs)
        config = config_of_call(own or roundpipe_run_config, self._config)
        self._require_rows(args, kwargs, config)
        self._settle()
        given = Given.of(args, kwargs)  # copies, should they be read again in a backward
        is_joined = config.requires_grad
        if is_joined is None:
            is_joined = torch.is_grad_enabled()
        is_joined = is_joined and (self._trains() or bool(given.leaves))
        with_loss = self._spec.computes_loss and kwargs.get("labels") is not None
        rule = LossRule(
            cut=_cut(config),
            reduction="token_mean",
            computes_loss=with_loss,
            takes_num_items=self._spec.takes_num_items,
            shifts_labels=self._spec.shifts_labels,
        )
        asked = ask_forward(given.args, given.kwargs, rule)
        if is_joined:
            self._spec.refuse_lost_gradients(args, kwargs)
            outputs = self._joined_to_graph(asked.microbatches, config, given)
        else:
            outputs = self._without_graph(asked.microbatches, config)
        with torch.set_grad_enabled(is_joined):  # ``requires_grad`` may say so
            if asked.loss is not None and config.merge_output is not False:
                put_whole_loss(outputs, asked.loss)
            return joined(outputs, config)

    def _without_graph(self, parts: Sequence[Microbatch], config: RoundPipeRunConfig) -> list[Any]:
        call = self._call(
            parts,
            config,
            newest=self._chain.staleness == 1,
            wants_logits=not config.loss_only,
        )
        with torch.inference_mode(False), self._chain.interruptible():
            run = self._chain.start_forward(call, config)
            self._engine.wait_results(run)
            self._engine.drain()
        return run.outputs

    def _joined_to_graph(
        self,
        parts: Sequence[Microbatch],
        config: RoundPipeRunConfig,
        given: Given,
        asked: Asked | None = None,
    ) -> list[Any]:
        """The outputs, joined to the caller's graph; ``asked``: what loss they are to have."""
        call = self._call(parts, config, is_training=True, keep_outputs=True, wants_logits=True)
        with self._chain.interruptible():
            forward = self._chain.run_differentiable(call, config, given.wanted)
        sizes = [part.num_samples for part in parts]

        def backward(gradients: list[list[Tensor | None]]) -> Sequence[Tensor | None]:
            self._ready()
            with torch.inference_mode(False), self._chain.interruptible():
                found = self._chain.run_backward(forward, gradients, asked)
            return given.gradients(found, sizes)

        with torch.enable_grad():
            return outputs_in_graph(forward.run.outputs, given.leaves, backward)

    def _require_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, config: RoundPipeRunConfig
    ) -> None:
        """Raise ConfigError for a causal LM's batch that is cut as usual and cannot be."""
        if config.split_input is None:
            require_rows(self._text_only.named(args, kwargs))

    def _as_named_in_training(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], RoundPipeRunConfig | None]:
        """What ``forward`` was given, also by the names that ``forward_backward`` has for it.

        Unless the model's own forward has an argument of such a name.
        """
        if args or _NAMES.isdisjoint(kwargs):
            return args, kwargs, None
        if not _NAMES.isdisjoint(inspect.signature(self.model.forward).parameters):
            return args, kwargs, None
        rest = {name: value for name, value in kwargs.items() if name not in _NAMES}
        named = {**(kwargs.get("input_kwargs") or {}), **rest}
        return tuple(kwargs.get("input_args", ())), named, kwargs.get("run_config")

    def _ready(self) -> None:
        """Raise what failed, and what cannot go on; take over what the caller has changed."""
        if not self._closer.alive or self._pool.is_closed:
            raise ConfigError(f"{self.name} is closed\nhint: wrap the model again")
        self._engine.raise_failure()
        self._notice_recovery()
        self._refuse_changed()
        self._hide_gradients()
        trained = (({n for n, t in x.tensors.items() if t.requires_grad}, x) for x in self._layers)
        if any(names != set(layer.trainable) for names, layer in trained):
            self._settle()
            self._hide_gradients()

    def _notice_recovery(self) -> None:
        """Forget what a failure took along; given again, that draws what it would have drawn."""
        lost = self._chain.notice_recovery()
        if lost is not None:
            self._num_calls.made = lost

    def _refuse_changed(self) -> None:
        """Raise ModelError if the module was changed past the wrapper since it was wrapped."""
        changed = self._spec.changed_since_wrapping() if self._closer.alive else None
        if changed is not None:
            raise ModelError(
                f"the module was changed after it was wrapped: {changed}\n"
                "hint: close() the RoundPipe, change the module, wrap it again"
            )

    def _retake_attributes(self) -> None:
        """Have devices run with the module's attributes as they are now; nothing is under way."""
        if self._closer.alive and not self._pool.is_closed:
            self._chain.follow_attributes()

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
        return Call(
            microbatches=parts,
            caller=CallerState.capture(),
            # What training draws must not hang on how often one has evaluated.
            seed=seed if is_training else pass_seed(seed),
            step=(self._num_calls if is_training else self._num_passes).next(),
            recompute_by_layer=config.recompute_grain == "layer",
            **more,
        )


def _refuse_tensor(input_args: Any) -> None:
    if isinstance(input_args, torch.Tensor):  # its rows would be taken for arguments
        raise ConfigError("input_args is a tensor, not a tuple\nhint: input_args=(x,)")


def _cut(config: RoundPipeRunConfig) -> Cut:
    return Cut(config.num_microbatch, config.split_input, config.split_label)
