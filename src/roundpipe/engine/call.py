"""What a call asks for: its microbatches, and the loss of each as part of the whole step's loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.engine.microbatch import Cut, Microbatch, split
from roundpipe.errors import ConfigError
from roundpipe.models.loss import (
    IGNORED,
    LossCount,
    check_reduction,
    count_trained_tokens,
    loss_factor,
    scale_loss,
)
from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.engine.run import Run

    LossFn = Callable[[Any, Any], Tensor | Sequence[Tensor]]

_HINT = "hint: loss_fn=…, or labels=… in input_kwargs for a causal LM"


@dataclass(frozen=True)
class Asked:
    """The microbatches of a call and how their losses add up.

    ``tokens`` are the trained tokens of the call where its loss is a mean over tokens, else None.
    ``divisor`` is what the loss was divided by: ``tokens``, or the first call's of the step.
    ``is_own``: the loss is part of what the model returns.
    """

    microbatches: Sequence[Microbatch]
    loss: Callable[[Any, Any, int], Tensor] | None
    tokens: int | None = None
    divisor: int | None = None
    is_own: bool = False

    def reported(self, loss: Tensor) -> Tensor:
        """The call's own mean, where the sum was divided by another call's tokens."""
        if not self.tokens or self.divisor in (None, self.tokens):
            return loss
        assert self.divisor is not None
        return loss * (self.divisor / self.tokens)


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How a call is cut and losses add up. ``divisor``: tokens a call before divided by."""

    cut: Cut = Cut()  # noqa: RUF009 - frozen
    reduction: str | None = None
    divisor: int | None = None
    computes_loss: bool = False  # whether the model does
    takes_num_items: bool = (
        False  # whether its loss divides by the ``num_items_in_batch`` it is given
    )
    shifts_labels: bool = True  # whether its loss leaves out the first label of a sequence


def ask_training(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    label: Any,
    loss_fn: LossFn | None,
    rule: LossRule,
) -> Asked:
    """Cut a training call and say what each microbatch's loss is.

    Without ``loss_fn`` a causal LM's own loss is used: a mean over the trained tokens of the whole
    step; of any other model the output is the loss. A sequence of losses becomes a vector, of which
    each element is one. ``divisor``: tokens that an earlier call of the same step has divided by.
    With ``loss_fn`` the losses are summed if the caller gave ``num_microbatch``, else averaged by
    samples, unless ``reduction`` says otherwise. Raises ConfigError where there is no loss.
    """
    reduction, divisor = rule.reduction, rule.divisor
    if reduction is not None:
        check_reduction(reduction)
    parts = split(args, kwargs, label, rule.cut)
    if loss_fn is None and rule.computes_loss:
        return _own_loss(parts, kwargs, rule)
    loss_of = _output_as_loss if loss_fn is None else loss_fn
    is_cut_by_caller = rule.cut.num_microbatch is not None or rule.cut.split_input is not None
    chosen = check_reduction(reduction or ("sum" if is_cut_by_caller else "mean"))
    tokens = [count_trained_tokens(part.label) if chosen == "token_mean" else 0 for part in parts]
    counts = [LossCount(part.num_samples, t) for part, t in zip(parts, tokens, strict=True)]
    total = LossCount.total(counts)
    if chosen == "token_mean":
        divided = divisor or total.tokens
        total = replace(total, tokens=divided)
    factors = [loss_factor(chosen, count, total) for count in counts]

    def loss(outputs: Any, label: Any, microbatch: int) -> Tensor:
        return scale_loss(_numbers(loss_of(outputs, label)), factors[microbatch])

    if chosen != "token_mean":
        return Asked(parts, loss)
    return Asked(parts, loss, tokens=sum(tokens), divisor=total.tokens)


def ask_forward(args: Sequence[Any], kwargs: Mapping[str, Any], rule: LossRule) -> Asked:
    """Cut a call of ``forward``; the model's own loss, if it computes one, as in training."""
    if rule.computes_loss:
        return ask_training(args, kwargs, None, None, rule)
    return Asked(split(args, kwargs, None, rule.cut), None)


def _own_loss(parts: Sequence[Microbatch], kwargs: Mapping[str, Any], rule: LossRule) -> Asked:
    reduction, divisor = rule.reduction, rule.divisor
    if kwargs.get("labels") is None:
        raise ConfigError(
            f"no loss to train on: no loss_fn, and no labels for the model's\n{_HINT}"
        )
    if reduction in ("sum", "mean"):
        total = LossCount(sum(part.num_samples for part in parts))
        factors = [loss_factor(reduction, LossCount(p.num_samples), total) for p in parts]  # type: ignore[arg-type]

        def scaled(outputs: Any, _: Any, microbatch: int) -> Tensor:
            return scale_loss(_scalar(outputs.loss), factors[microbatch])

        return Asked(parts, scaled, is_own=True)

    def own(outputs: Any, _: Any, __: int) -> Tensor:
        return _scalar(outputs.loss)

    if "num_items_in_batch" in kwargs:  # the caller counts, over calls of ours we know nothing of
        return Asked(parts, own, is_own=True)
    tokens = _trained_tokens(kwargs, rule)
    divided = divisor or tokens
    loss_factor("token_mean", LossCount(0, tokens), LossCount(0, divided))  # refuses a step of none
    # With a router's auxiliary loss the whole loss is a mean weighted by tokens: that loss would
    # else grow with the number of microbatches.
    if rule.takes_num_items and not kwargs.get("output_router_logits"):
        parts = with_kwargs(parts, num_items_in_batch=divided)
        return Asked(parts, own, tokens=tokens, divisor=divided, is_own=True)
    counts = [_trained_tokens(part.inputs.kwargs or {}, rule) for part in parts]
    shares = [loss_factor("token_mean", LossCount(0, n), LossCount(0, divided)) for n in counts]

    def share(outputs: Any, _: Any, microbatch: int) -> Tensor:
        return scale_loss(_scalar(outputs.loss), shares[microbatch])

    return Asked(parts, share, tokens=tokens, divisor=divided, is_own=True)


def _trained_tokens(kwargs: Mapping[str, Any], rule: LossRule) -> int:
    """What a model's own loss is a mean over; transformers' takes labels that the caller shifted.

    And another number that marks what is not trained.
    """
    ignored = kwargs.get("ignore_index", IGNORED)
    if (shifted := kwargs.get("shift_labels")) is not None:
        return count_trained_tokens(shifted, shifted=False, ignored=ignored)
    return count_trained_tokens(kwargs["labels"], shifted=rule.shifts_labels, ignored=ignored)


def with_kwargs(parts: Sequence[Microbatch], **more: Any) -> list[Microbatch]:
    """The microbatches with more keyword arguments, the same for all."""
    return [
        replace(part, inputs=Inputs(part.inputs.args, {**(part.inputs.kwargs or {}), **more}))
        for part in parts
    ]


def _output_as_loss(outputs: Any, _: Any) -> Any:
    """The loss of a model that returns it."""
    for each in outputs if _is_sequence(outputs) else (outputs,):
        if not isinstance(each, torch.Tensor) or each.numel() != 1:
            raise ConfigError(f"no loss to train on: no loss_fn, and the output is none\n{_HINT}")
    return outputs


def _is_sequence(found: Any) -> bool:
    return isinstance(found, (list, tuple)) and len(found) > 0


def _numbers(loss: Any) -> Tensor:
    """A loss, 0-d, or a sequence of them, 1-d."""
    if _is_sequence(loss):
        return torch.stack([_scalar(each) for each in loss])
    return _scalar(loss)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"a loss must be one number: {kind}\nhint: reduce it, e.g. loss.mean()")
    return loss.reshape(())


def total_loss(losses: Sequence[Tensor | None]) -> Tensor:
    """The sum of the microbatches' losses, in their order, in memory of its own as in `joined`."""
    total = None
    for loss in losses:
        assert loss is not None
        if total is not None and loss.shape != total.shape:
            raise ConfigError(
                "loss_fn gave another number of losses for one microbatch than for another: "
                f"{loss.numel()} and {total.numel()}"
            )
        total = loss.clone() if total is None else total + loss
    assert total is not None
    return total


class StepInMaking:
    """The calls since the last step, and the trained tokens their losses are means over."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._divisor: int | None = None
        self._tokens: list[int] = []
        self._num_others = 0  # calls that are no mean over tokens

    @property
    def divisor(self) -> int | None:
        """What the losses of this step's first call were divided by; None before it."""
        return self._divisor if self.runs else None

    @property
    def token_scale(self) -> float:
        """What turns gradients divided by the first call's tokens into ones divided by all."""
        total = sum(self._tokens)
        if self._divisor is None or not total or self._divisor == total:
            return 1.0
        return self._divisor / total

    def settle(self) -> float:
        """What gradients must be multiplied by now, to be those of one mean over all tokens.

        Whoever asks does it: from then on losses are means over all tokens so far.
        """
        scale = self.token_scale
        if scale != 1.0:
            self._divisor = sum(self._tokens)
        return scale

    def check(self, asked: Asked) -> None:
        """Raise ConfigError for a call whose gradients must be scaled otherwise than the others'.

        Several means over tokens are scaled to one by all the step's tokens, and so would be
        whatever else is among the gradients.
        """
        means = len(self._tokens) + (asked.tokens is not None)
        others = self._num_others + (asked.tokens is None)
        if means > 1 and others:
            raise ConfigError(
                "some calls of this step are means over tokens and some are not\n"
                "hint: step after each, or give all of them a loss_fn and loss_reduction='sum'"
            )

    def count(self, asked: Asked) -> None:
        """Add a call whose results have come."""
        if asked.tokens is None:
            self.count_other()
        else:
            self._divisor = asked.divisor
            self._tokens.append(asked.tokens)

    def count_other(self) -> None:
        """Add a call that is no mean over tokens."""
        self._num_others += 1

    def end(self) -> None:
        """The step is made, or given up."""
        self.runs.clear()
        self._tokens.clear()
        self._divisor, self._num_others = None, 0


def put_whole_loss(outputs: Sequence[Any], loss: Callable[[Any, Any, int], Tensor]) -> None:
    """Each microbatch's loss is a share of the whole: let their sum stand in all of them."""
    shares = [loss(output, None, microbatch) for microbatch, output in enumerate(outputs)]
    set_loss(outputs, total_loss(shares))


def set_loss(outputs: Sequence[Any], loss: Tensor) -> None:
    """Let every microbatch's output have this loss."""
    for output in outputs:
        output.loss = loss
