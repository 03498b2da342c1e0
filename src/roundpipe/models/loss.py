"""How the losses of microbatches become the loss of a step.

A mean of means is not the mean: a microbatch of 3 trained tokens must not weigh as much as one of
40. So each microbatch's loss is multiplied by a factor before its backward, and the step's loss is
the plain sum. The factors depend on the whole step's counts alone, never on how it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LossReduction = Literal["sum", "mean", "token_mean"]
IGNORED = -100  # the label of a token that is not trained, as torch's cross entropy has it


def check_reduction(reduction: str) -> LossReduction:
    """Return the name if it is one; raises ConfigError otherwise."""
    for known in get_args(LossReduction):
        if reduction == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"unknown loss reduction: {reduction}\nhint: sum, mean or token_mean")


def count_trained_tokens(labels: Tensor, *, shifted: bool = True, ignored: int = IGNORED) -> int:
    """Count the labels that a causal LM is trained on: ``labels`` [..., length] is int64.

    ``sum(labels[..., 1:] != -100)``: token t is predicted from those before it, so the first label
    of a sequence is never used. It is what the causal LM loss of transformers divides by when it
    is not given ``num_items_in_batch``. Where labels are not ``shifted`` all of them count.
    ``ignored``: the label of what is not trained. Waits for the device if the labels are on one.
    """
    used = labels[..., 1:] if shifted else labels
    return int((used != ignored).sum())


@dataclass(frozen=True)
class LossCount:
    """How much one microbatch, or the whole step, trains on."""

    samples: int
    tokens: int = 0

    @classmethod
    def total(cls, parts: Sequence[LossCount]) -> LossCount:
        """Add up the counts of microbatches."""
        return cls(sum(part.samples for part in parts), sum(part.tokens for part in parts))


def loss_factor(reduction: LossReduction, microbatch: LossCount, step: LossCount) -> float:
    """Return what a microbatch's loss is multiplied with, so that the step's loss is the sum.

    With L the loss of microbatch m, n its samples and t its trained tokens:

    - ``sum``: 1. The step's loss is ``sum(L)``.
    - ``mean``: ``n / sum(n)``, for an L that is a mean over the microbatch's samples.
    - ``token_mean``: ``t / sum(t)``, for an L that is a mean over its trained tokens.

    A factor of 0 means that L must not be used at all: a mean over nothing is NaN (`scale_loss`).
    Raises ConfigError if the whole step has nothing to take a mean over.
    """
    if reduction == "sum":
        return 1.0
    part, whole = (
        (microbatch.samples, step.samples)
        if reduction == "mean"
        else (microbatch.tokens, step.tokens)
    )
    if whole <= 0:
        raise ConfigError(
            f"nothing to train on in this step: loss_reduction={reduction} over {whole} "
            f"{'samples' if reduction == 'mean' else 'tokens'}\n"
            "hint: labels other than -100 are needed past the first token of a sequence"
        )
    return part / whole


def scale_loss(loss: Tensor, factor: float) -> Tensor:
    """Multiply a microbatch's loss with its `loss_factor`.

    A factor of 0 gives 0, and gradients of 0 with the losses of torch and transformers, though
    their mean over no tokens is NaN.
    """
    if factor == 0.0:
        return loss.nan_to_num(0.0) * 0.0
    return loss if factor == 1.0 else loss * factor
