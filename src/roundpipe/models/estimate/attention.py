"""Attention as the fused kernels do it: no matrix of length by length is ever made.

On the meta device PyTorch takes the plain road, which makes one. So calls of
``scaled_dot_product_attention`` are taken over by a function that has the kernels' shapes, saves
what they save (queries, keys, values, output, one logarithm a row, a mask if there is one) and
tells the meter what they compute. FlashAttention skips what lies above the diagonal; under a mask
that is given as a tensor nothing is skipped.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roundpipe.models.estimate.profile import ATTENTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roundpipe.models.estimate.meter import Meter

_FUSED = "flash_attention_2"  # the name under which transformers looks the kernels up
# Backward makes five products of the size of forward's two (Dao et al. 2022, appendix B).
_BACKWARD_PER_FORWARD = 2.5


class FusedAttention(TorchFunctionMode):
    """Takes over ``scaled_dot_product_attention`` while layers run under ``meter``."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Any:
        share = 0.5 if is_causal and attn_mask is None else 1.0
        return _run_kernel(query, key, value, attn_mask, self._meter, share)


@contextmanager
def fused_everywhere(meter: Meter, config: Any) -> Iterator[None]:
    """Let a model that knows no fused attention run as if it had it, sinks and windows too.

    Its config and the table of transformers are changed meanwhile.
    """
    from transformers.modeling_utils import (  # noqa: PLC0415 (imports late)
        ALL_ATTENTION_FUNCTIONS,
    )

    def attend(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        length = query.shape[-2]
        window = min(kwargs.get("sliding_window") or length, length)
        pairs = window * length - window * (window - 1) / 2  # row i sees min(i + 1, window) keys
        out = _run_kernel(query, key, value, None, meter, pairs / length**2)
        return out.transpose(1, 2), None

    implementation = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_FUSED] = attend  # of this one table, never of transformers' own
    config._attn_implementation_internal = _FUSED
    try:
        yield
    finally:
        config._attn_implementation_internal = implementation
        del ALL_ATTENTION_FUNCTIONS[_FUSED]  # type: ignore[no-untyped-call]


def _run_kernel(*arguments: Any) -> Tensor:
    out: Tensor = _FusedKernel.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _FusedKernel(torch.autograd.Function):
    """Shapes, saved tensors and work of a fused attention kernel.

    query [batch, heads, length, d], key [batch, key heads, length, d], value [.., e]; returns
    [batch, heads, length, e], in memory [batch, length, heads, e] as the kernels have it.
    ``share``: of all pairs of positions, those that are computed.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - what the kernels are given, and where to count
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        meter: Meter,
        share: float,
    ) -> Tensor:
        """Make the output and count the work."""
        batch, heads, length, depth = query.shape
        wide = value.shape[-1]
        out = query.new_empty(batch, length, heads, wide).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:  # kernels add it, as numbers
            mask = torch.empty_like(mask, dtype=query.dtype)
        masks = [] if mask is None else [mask]
        pairs = batch * heads * length * key.shape[-2] * share
        ctx.save_for_backward(query, key, value, out, sums, *masks)
        ctx.meter, ctx.flops = meter, int(2 * pairs * (depth + wide))
        moved = [query, key, value, out, *masks]
        meter.counts.note(ATTENTION, flops=ctx.flops, moved=_bytes(moved))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Make the gradients, with the fp32 sums of the query's, and count the work."""
        query, key, value, out, *others = ctx.saved_tensors
        torch.empty_like(query, dtype=torch.float32)
        grads = tuple(_like(tensor) for tensor in (query, key, value))
        moved = [query, key, value, out, *others, grad, *grads]
        flops = int(ctx.flops * _BACKWARD_PER_FORWARD)
        ctx.meter.counts.note(ATTENTION, flops=flops, moved=_bytes(moved))
        return (*grads, None, None, None)


def _like(tensor: Tensor) -> Tensor:
    batch, heads, length, depth = tensor.shape
    return tensor.new_empty(batch, length, heads, depth).transpose(1, 2)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
