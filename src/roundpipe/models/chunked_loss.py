"""Head and loss by chunks of tokens, so that the logits of a whole microbatch are never there.

    hidden [tokens, width] --head--> logits [tokens, words] --cross entropy--> one number

Words are many (128 thousand), so logits in fp32 with what autograd makes of them weigh more than
all else of a last stage. A chunk's logits live from its head to its gradient: the gradient of the
loss by logits is known as soon as the logits are, so forward makes it at once and keeps only what
it turns into: the gradient of the hidden state and, in fp32, of the head's parameters. Backward
multiplies them by what comes from above. So nothing is computed twice, and what many chunks add to
a 16-bit weight is not rounded each time. Which chunks there are depends on shapes alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WHOLE_BYTES = 256 << 20  # of fp32 logits: so many are made at once, as plain PyTorch does
# Tokens of a chunk. A trained weight's sum is read and written for each: with fewer than so many
# that takes a card a tenth of the products' time and more.
TRAINED_ROWS, FROZEN_ROWS = 2048, 1024
_TILE = 128  # of matrix kernels
_WORDS = 8192  # whose weight gradient is made at a time, where it cannot be added up in place
_AUTOCAST = ("cpu", "cuda")  # others are asked in vain, or not at all
_HALF_SCALE = 256.0  # keeps probabilities of 1e-5 out of fp16's subnormal numbers


def most_whole_tokens(vocabulary: int) -> int:
    """Of how many tokens all logits are made at once; of more in chunks."""
    return WHOLE_BYTES // (4 * max(vocabulary, 1))


def rows_of_chunk(num_tokens: int, *, trained: bool) -> int:
    """Tokens of each chunk but the last, which has fewer; chunks are as even as tiles allow."""
    most = TRAINED_ROWS if trained else FROZEN_ROWS
    count = max(-(-num_tokens // most), 1)
    even = max(-(-num_tokens // count), 1)
    return min(-(-even // _TILE) * _TILE, most)


class Step(NamedTuple):
    """What a model does to each logit by itself, between head and loss."""

    run: Callable[[Tensor], Tensor]
    is_upcast: bool = False  # to fp32 and nothing else


@dataclass(frozen=True, eq=False)
class Head:
    """How logits come of hidden states, row by row. ``forward`` is the module's own.

    ``rows``: of a chunk, in place of what `rows_of_chunk` says. ``work_bytes`` notes, for each loss
    that was made, the bytes of a chunk at its worst moment.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    steps: tuple[Step, ...] = ()
    rows: int | None = None
    work_bytes: list[int] = field(default_factory=list)

    def then(self, step: Step) -> Head:
        """The same with one more step."""
        return replace(self, steps=(*self.steps, step))

    def without_upcast(self) -> Head:
        """The same without the last step, if that is a cast that the loss makes anyway."""
        if self.steps and self.steps[-1].is_upcast:
            return replace(self, steps=self.steps[:-1])
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits ``[rows, words]`` of ``hidden`` ``[rows, width]``."""
        logits = self.forward(hidden)
        for step in self.steps:
            logits = step.run(logits)
        return logits

    def note(self, chunk: _Chunk) -> None:
        """Note what a chunk takes: what head and steps made, and probabilities beside it."""
        made = 1 + len(self.steps)
        self.work_bytes.append(made * chunk.logits.nbytes + chunk.beside_bytes)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def linear(self) -> nn.Linear | None:
        """The module, where logits are just a product with its weight."""
        own = getattr(self.forward, "__func__", None)
        is_plain = own is nn.Linear.forward and type(self.module) is nn.Linear and not self.steps
        return self.module if is_plain and isinstance(self.module, nn.Linear) else None


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The words to be predicted, int64 ``[rows]``, and how their losses add up."""

    words: Tensor
    ignored: int = -100
    is_mean: bool = True


def chunked_cross_entropy(head: Head, hidden: Tensor, targets: Targets, dtype: torch.dtype) -> Any:
    """The cross entropy, 0-d, of the logits of ``hidden`` ``[rows, width]``, added up in ``dtype``.

    Equal to ``F.cross_entropy`` of all logits up to the order of sums. Can be differentiated once.
    Nothing is read from the device.
    """
    head = head.without_upcast()
    trained = head.trained if torch.is_grad_enabled() else []
    rows = head.rows or rows_of_chunk(len(hidden), trained=bool(trained))
    given = _Given(head, targets, rows, dtype, torch.is_grad_enabled())
    return _Loss.apply(given, hidden, *trained)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Given:
    head: Head
    targets: Targets
    rows: int
    dtype: torch.dtype
    wants_gradient: bool


class _Loss(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    def forward(ctx: Any, given: _Given, hidden: Tensor, *trained: nn.Parameter) -> Tensor:
        targets = given.targets
        sums = _Sums.begin(hidden, trained) if given.wants_gradient else None
        total = torch.zeros((), dtype=given.dtype, device=hidden.device)
        for start in range(0, len(hidden), given.rows):
            part = slice(start, min(start + given.rows, len(hidden)))
            total += _run_chunk(given, hidden[part], part, sums)
        ctx.divisor, ctx.sums, ctx.is_over = None, None, False
        count = (targets.words != targets.ignored).sum()
        if sums is not None:
            ctx.save_for_backward(sums.hidden)
            # not among the saved tensors: whoever weighs those counts a gradient for itself
            ctx.sums, ctx.scale = sums.trained, sums.scale
            ctx.divisor = count.clamp(min=1) if targets.is_mean else None
        return total / count if targets.is_mean else total  # of no words: not a number, as in torch

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        if ctx.is_over:
            raise RuntimeError("the loss in chunks can be differentiated once only")
        ctx.is_over = True
        factor = above[0] if ctx.divisor is None else above[0] / ctx.divisor
        factor = factor / ctx.scale
        (hidden,) = ctx.saved_tensors
        sums, ctx.sums = ctx.sums, None
        found = [None if each is None else each.mul_(factor) for each in (hidden, *sums)]
        return (None, *found)


@dataclass
class _Sums:
    """Gradients, as far as chunks have been run; for a loss whose own gradient is ``scale``."""

    hidden: Tensor | None
    trained: list[Tensor]
    scale: float

    @classmethod
    def begin(cls, hidden: Tensor, trained: Sequence[nn.Parameter]) -> _Sums:
        return cls(
            torch.empty_like(hidden) if hidden.requires_grad else None,
            [
                torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                for p in trained
            ],
            _HALF_SCALE if hidden.dtype == torch.float16 else 1.0,
        )


class _Chunk:
    """Softmax of one chunk's logits, which it may write over if they are ``own``.

    Made step by step in place: with bf16 logits no moment needs more than 6 bytes for each.
    """

    def __init__(self, logits: Tensor, given: _Given, part: slice, *, own: bool) -> None:
        self.logits, self._own = logits, own
        words = given.targets.words[part]
        self._is_used = words != given.targets.ignored
        self._words = words.masked_fill(~self._is_used, 0)[:, None]
        is_wide = own and logits.dtype == given.dtype
        wide = logits if is_wide else logits.to(given.dtype, copy=True)
        wide.sub_(wide.amax(-1, keepdim=True))
        picked = wide.gather(1, self._words)
        self._powers, self._sums = wide.exp_(), wide.sum(-1, keepdim=True)
        losses = (self._sums.log() - picked).squeeze(1)
        self.loss = losses.masked_fill(~self._is_used, 0.0).sum()
        self.beside_bytes = 0 if is_wide else wide.nbytes

    def gradient(self, scale: float) -> Tensor:
        """Of the sum of losses by the logits: probability, less one for the word itself."""
        found = self._powers.div_(self._sums)
        found.scatter_(1, self._words, found.gather(1, self._words) - 1.0)
        if scale != 1.0:
            found.mul_(scale)
        if found.dtype != self.logits.dtype:
            like = self.logits if self._own else torch.empty_like(self.logits)
            found = like.copy_(found)
        return found.masked_fill_(~self._is_used[:, None], 0.0)


def _run_chunk(given: _Given, hidden: Tensor, part: slice, sums: _Sums | None) -> Tensor:
    """The sum of one chunk's losses; its gradients go to ``sums``."""
    head = given.head
    if sums is None:
        return _Chunk(head.logits(hidden), given, part, own=False).loss
    is_cast = hidden.device.type in _AUTOCAST and torch.is_autocast_enabled(hidden.device.type)
    if head.linear is not None and not is_cast:
        return _run_product(head.linear, given, hidden, part, sums)
    # What the chunk's own graph saves is no concern of those who weigh the caller's.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        leaf = hidden.detach().requires_grad_(sums.hidden is not None)
        logits = head.logits(leaf)
    chunk = _Chunk(logits.detach(), given, part, own=False)  # the graph may have saved them
    head.note(chunk)
    if not logits.requires_grad:
        return chunk.loss
    wanted: list[Tensor] = [*head.trained, *([leaf] if leaf.requires_grad else [])]
    with torch.autocast(hidden.device.type, enabled=False) if is_cast else nullcontext():
        gradient = chunk.gradient(sums.scale)
        found = list(torch.autograd.grad(logits, wanted, gradient, allow_unused=True))
    if sums.hidden is not None:
        of_hidden = found.pop()
        assert of_hidden is not None
        sums.hidden[part] = of_hidden
    for total, each in zip(sums.trained, found, strict=True):
        if each is not None:
            total.add_(each)
    return chunk.loss


def _run_product(
    linear: nn.Linear, given: _Given, hidden: Tensor, part: slice, sums: _Sums
) -> Tensor:
    """The same, where logits are a product with a weight: its gradient is added up in place."""
    logits = nn.functional.linear(hidden, linear.weight, linear.bias)
    chunk = _Chunk(logits, given, part, own=True)
    given.head.note(chunk)
    gradient = chunk.gradient(sums.scale)
    if sums.hidden is not None:
        torch.mm(gradient, linear.weight, out=sums.hidden[part])
    trained = iter(sums.trained)
    if linear.weight.requires_grad:
        _add_product(next(trained), gradient, hidden)
    if linear.bias is not None and linear.bias.requires_grad:
        total = next(trained)
        total.add_(gradient.sum(0, dtype=total.dtype))
    return chunk.loss


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to ``total``, which may be wider than both, without rounding first."""
    if left.dtype == total.dtype:
        torch.addmm(total, left.T, right, out=total)
        return
    is_cpu = total.device.type == "cpu"
    if not is_cpu and torch.version.hip is None:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    right = right.to(total.dtype) if is_cpu else right
    for start in range(0, len(total), _WORDS):
        words = slice(start, min(start + _WORDS, len(total)))
        block = left[:, words].T
        if is_cpu:  # products of 16-bit numbers have no kernel on many CPUs
            total[words].addmm_(block.to(total.dtype), right)
        else:
            total[words].add_(block @ right)


def _same(tensor: Tensor) -> Tensor:
    return tensor
