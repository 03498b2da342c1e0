"""Logits that are not there: what a model does with them is noted, and done chunk by chunk.

A model's own ``forward`` runs from the head to the loss as it is, soft caps and scales and shifts
included, over a tensor that has the logits' shape and no memory. It understands four things:
questions about its shape and dtype, moving whole rows (one row a token), arithmetic that treats
each logit by itself, and ``cross_entropy``, which makes the loss (`roundpipe.models.chunked_loss`).
Anything else ends the forward with `NotInChunks`; then it is run with all logits instead.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.models.chunked_loss import (
    Head,
    Step,
    Targets,
    chunked_cross_entropy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

_FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_meta")),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_quantized", "is_sparse")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.__len__),
        *(Tensor.is_floating_point, torch.is_floating_point, torch.numel, Tensor.is_complex),
    }
)
_ROWS = frozenset(
    {
        *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten),
        *(Tensor.contiguous, Tensor.__getitem__),
    }
)
_EACH = frozenset(
    {
        *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to),
        *(Tensor.mul, torch.mul, torch.multiply, Tensor.__mul__, Tensor.__rmul__),
        *(Tensor.div, torch.div, torch.true_divide, Tensor.true_divide, Tensor.__truediv__),
        *(Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__),
        *(Tensor.sub, torch.sub, Tensor.__sub__, Tensor.__rsub__),
        *(Tensor.neg, torch.neg, Tensor.__neg__, Tensor.tanh, torch.tanh),
        *(Tensor.clamp, torch.clamp, Tensor.clone, torch.clone),
    }
)
_CROSS_ENTROPY = inspect.signature(nn.functional.cross_entropy)


class NotInChunks(BaseException):
    """A model does something that needs its logits; no `Exception`, so that nobody keeps it."""


class LazyLogits(Tensor):
    """See the module docstring."""

    _hidden: Tensor  # one row for each row of logits
    _head: Head
    _sample: Tensor  # [0, words], as the logits would be

    @classmethod
    def of(cls, hidden: Tensor, head: Head, sample: Tensor) -> LazyLogits:
        """The logits of ``hidden`` ``[..., width]``."""
        shape = (*hidden.shape[:-1], sample.shape[-1])
        lazy = sample.new_zeros(()).expand(shape).as_subclass(cls)
        lazy._hidden, lazy._head, lazy._sample = hidden, head, sample
        return lazy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is nn.functional.cross_entropy:
            return _loss(*args, **kwargs)
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
        if func in _ROWS and isinstance(args[0], LazyLogits) and not others:
            return args[0]._moved(func, args[1:], kwargs)
        if func in _EACH:
            return _each(func, args, kwargs)
        raise NotInChunks(getattr(func, "__name__", repr(func)))

    def _moved(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LazyLogits:
        """Do to the rows of the hidden state what is done to those of the logits."""
        hidden, words = self._hidden, self._sample.shape[-1]
        wanted = func(self._shaped(words), *args, **kwargs).shape
        shape = (*wanted[:-1], hidden.shape[-1])
        if wanted[-1:] == (words,):
            if func is not Tensor.__getitem__:  # in order as before, and cut where rows end
                return LazyLogits.of(hidden.reshape(shape), self._head, self._sample)
            # Whether it leaves the words alone shows where there is one more of them.
            more = func(self._shaped(words + 1), *args, **kwargs).shape
            moved = hidden[args[0]]
            if more == (*wanted[:-1], words + 1) and moved.shape == shape:
                return LazyLogits.of(moved, self._head, self._sample)
        raise NotInChunks(f"{func.__name__} across words")

    def _shaped(self, words: int) -> Tensor:
        """A tensor as these logits with so many words, and no memory."""
        return torch.zeros((), device="meta").expand(*self._hidden.shape[:-1], words)


def _each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyLogits:
    """Note what is done to each logit by itself."""
    places = [place for place, value in enumerate(args) if isinstance(value, LazyLogits)]
    if len(places) != 1 or any(isinstance(value, Tensor) for value in kwargs.values()):
        raise NotInChunks(f"{func.__name__} of several")
    place = places[0]
    lazy: LazyLogits = args[place]
    words = lazy._sample.shape[-1]
    given = [_operand(value, words) for value in args]

    def run(logits: Tensor) -> Tensor:
        return func(*given[:place], logits, *given[place + 1 :], **kwargs)  # type: ignore[no-any-return]

    sample = run(lazy._sample)
    if sample is lazy._sample:  # a cast to what it is already
        return lazy
    if sample.shape != lazy._sample.shape or sample.device != lazy._sample.device:
        raise NotInChunks(f"{func.__name__} to {tuple(sample.shape)} on {sample.device}")
    is_upcast = func is Tensor.float and lazy._sample.element_size() < 4
    return LazyLogits.of(lazy._hidden, lazy._head.then(Step(run, is_upcast)), sample)


def _operand(value: Any, words: int) -> Any:
    """What else an operation takes: no tensor, or a constant of one value or one for each word."""
    if not isinstance(value, Tensor) or isinstance(value, LazyLogits):
        return value
    if value.requires_grad or value.numel() not in (1, words):
        raise NotInChunks(f"an operand with a gradient or of {tuple(value.shape)}")
    if value.dim() == 0:
        return value
    if value.shape[-1] != value.numel():
        raise NotInChunks(f"an operand of {tuple(value.shape)}")
    return value.reshape(-1)


def _loss(*args: Any, **kwargs: Any) -> Any:
    """``cross_entropy`` of logits that are not there."""
    bound = _CROSS_ENTROPY.bind(*args, **kwargs)
    bound.apply_defaults()
    lazy, target = bound.arguments["input"], bound.arguments["target"]
    reduction = bound.arguments["reduction"]
    unusual = [n for n in ("weight", "size_average", "reduce") if bound.arguments[n] is not None]
    unusual += ["label_smoothing"] if bound.arguments["label_smoothing"] else []
    if unusual or reduction not in ("mean", "sum") or not isinstance(lazy, LazyLogits):
        raise NotInChunks(f"cross_entropy with {', '.join(unusual) or reduction}")
    hidden, dtype = lazy._hidden, lazy._sample.dtype
    is_words = target.dtype == torch.int64 and target.device == hidden.device
    if hidden.dim() != 2 or target.shape != hidden.shape[:-1] or not is_words:
        raise NotInChunks(f"cross_entropy of {tuple(lazy.shape)} and {tuple(target.shape)}")
    if dtype not in (torch.float32, torch.float64):
        raise NotInChunks(f"cross_entropy in {dtype}")
    ignored = bound.arguments["ignore_index"]
    targets = Targets(words=target, ignored=ignored, is_mean=reduction == "mean")
    return chunked_cross_entropy(lazy._head, hidden, targets, dtype)


class ChunkedHead:
    """A head that gives `LazyLogits` within ``with``, in place of its own forward.

    ``rows``: of a chunk, in place of the usual.
    """

    def __init__(self, module: nn.Module, rows: int | None = None) -> None:
        self._module = module
        self._head = Head(module, module.forward, rows=rows)
        self._is_own = "forward" in vars(module)  # and not its class's

    @staticmethod
    def can_be(module: nn.Module) -> bool:
        """Whether a module's forward is all that runs when it is called."""
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        return not any(getattr(each, name) for each in module.modules() for name in hooks)

    @property
    def rows(self) -> int | None:
        """Tokens of a chunk, where they were given."""
        return self._head.rows

    @property
    def work_bytes(self) -> int:
        """Bytes of a chunk at its worst moment, of the last loss that was made."""
        return max(self._head.work_bytes, default=0)

    def __enter__(self) -> None:
        self._head.work_bytes.clear()
        vars(self._module)["forward"] = self._lazy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        del vars(self._module)["forward"]
        if self._is_own:
            vars(self._module)["forward"] = self._head.forward

    def _lazy(self, *given: Any, **named: Any) -> LazyLogits:
        hidden = given[0] if len(given) == 1 and not named else None
        if not isinstance(hidden, Tensor) or isinstance(hidden, LazyLogits) or hidden.dim() < 2:
            raise NotInChunks("a head that takes more than a hidden state")
        # Without rows nothing is computed or drawn. With gradient, so that chunks reach the weight
        # through a cast of it that autocast keeps from here on.
        with torch.enable_grad():
            sample = self._head.forward(hidden[..., :0, :].reshape(0, hidden.shape[-1]))
        if not isinstance(sample, Tensor) or sample.dim() != 2 or sample.shape[0]:
            raise NotInChunks("a head that returns something else than logits")
        return LazyLogits.of(hidden, self._head, sample.detach())
