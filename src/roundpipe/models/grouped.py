"""Routed experts in grouped products: rows sorted by expert, one product for all experts.

    hidden [tokens, h] --by expert--> [rows, h] --up--> [rows, i] --gate--> --down--> [rows, h]
                                                  rows = tokens x experts a token is sent to

A token makes as many rows as it has experts, so what lies between takes far more memory than the
layer's input: 7 GB for 31,744 tokens of a layer with 8 of 128 experts, hidden size 4096 and
intermediate size 1536. Where the weights are frozen, `run_in_pieces` keeps from forward to backward
what comes out of the first product and nothing else, and has the rest of one piece of tokens alive
at a time. It needs no product more than autograd would:

1. The gradient of a row's routing weight is <g, down(x)>, g being the gradient of the row's output.
   That is <down'(g), x>, and down'(g) is needed anyway, so down(x) is not computed again.
2. Rows are sorted again in backward, and the gate computed again: no products.

Adapters on stacked weights are two more grouped products beside each, x A[e] B[e], never a sum of
weights: W + A B for all experts would be as large as W, and so would be its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Gate = Callable[[Tensor], Tensor]

# Gathered rows of one piece. Large enough that each expert of a wide layer gets hundreds of rows,
# so that reading its weights takes less time than multiplying by them.
PIECE_BYTES = 512 * 2**20
_ROW_BYTES = 16  # grouped products want rows that begin at multiples of it


def tokens_in_piece(top_k: int, row_bytes: int) -> int:
    """How many tokens, of ``row_bytes`` each and sent to ``top_k`` experts, make a piece."""
    return max(PIECE_BYTES // (top_k * row_bytes), 1)


def is_alignable(weight: Tensor) -> bool:
    """Whether grouped products take the stack: they want both sides at multiples of 16 bytes."""
    return all(side * weight.element_size() % _ROW_BYTES == 0 for side in weight.shape[-2:])


@dataclass(frozen=True, eq=False)
class Factors:
    """Low-rank additions to a stack: ``a`` [experts, rank, in], ``b`` [experts, out, rank].

    The scaling is part of ``b``; both lie as their shapes say, ranks padded to whole 16 bytes.
    """

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> Factors | None:
        """Join several adapters, given as ``a`` and ``b`` in any memory layout, to one."""
        if not pairs:
            return None
        a = torch.cat([a for a, _ in pairs], dim=1) if len(pairs) > 1 else pairs[0][0]
        b = torch.cat([b for _, b in pairs], dim=2) if len(pairs) > 1 else pairs[0][1]
        padding = -a.shape[1] % (_ROW_BYTES // a.element_size())
        if padding:
            a = torch.nn.functional.pad(a, (0, 0, 0, padding))
            b = torch.nn.functional.pad(b, (0, padding))
        return cls(a.contiguous(), b.contiguous())

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """What the adapters add to the product of ``rows``."""
        low = product(rows, self.a.transpose(-2, -1), offsets)
        return product(low, self.b.transpose(-2, -1), offsets)


@dataclass(frozen=True, eq=False)
class Stack:
    """One linear module for each expert.

    ``weight``: [experts, out, in], or [experts, in, out] if ``is_transposed``.
    """

    weight: Tensor
    bias: Tensor | None = None  # [experts, out]
    factors: Factors | None = None
    is_transposed: bool = False

    @property
    def width(self) -> int:
        """Of what comes out."""
        return self.weight.shape[-1 if self.is_transposed else -2]

    @property
    def width_in(self) -> int:
        """Of what goes in."""
        return self.weight.shape[-2 if self.is_transposed else -1]

    def __call__(self, rows: Tensor, routing: Routing) -> Tensor:
        """The output of every row's expert: [rows, in] -> [rows, out]."""
        weight = self.weight if self.is_transposed else self.weight.transpose(-2, -1)
        out = product(rows, weight, routing.offsets)
        added = self.added(rows, routing)
        return out if added is None else out.add_(added)

    def added(self, rows: Tensor, routing: Routing) -> Tensor | None:
        """What bias and adapters add to the product with the weight; None for nothing."""
        bias = None if self.bias is None else self.bias[routing.experts]
        if self.factors is None:
            return bias
        beside = self.factors(rows, routing.offsets)
        return beside if bias is None else beside + bias

    def back(self, gradient: Tensor, routing: Routing) -> Tensor:
        """The gradient for the rows by way of the weight alone: [rows, out] -> [rows, in]."""
        weight = self.weight.transpose(-2, -1) if self.is_transposed else self.weight
        return product(gradient, weight, routing.offsets)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weight, bias, and both factors."""
        factors = (None, None) if self.factors is None else (self.factors.a, self.factors.b)
        return (self.weight, self.bias, *factors)

    def holding(self, weight: Tensor, bias: Tensor | None, *factors: Tensor | None) -> Stack:
        """The same of other tensors, in the order of ``tensors``."""
        a, b = factors
        pair = None if a is None or b is None else Factors(a, b)
        return Stack(weight, bias, pair, self.is_transposed)


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows there are, sorted by expert. ``index``: [tokens, top k], experts of each token."""

    experts: Tensor  # of each row, ascending
    order: Tensor  # of each row, its place in the flattened index
    places: Tensor  # of each place in the flattened index, its row
    offsets: Tensor  # of each expert, where its rows end; int32
    top_k: int

    @classmethod
    def of(cls, index: Tensor, num_experts: int) -> Routing:
        """Sort; six operations whatever the number of experts, and none that the host waits for."""
        experts, order = torch.sort(index.reshape(-1), stable=True)
        every = torch.arange(num_experts, device=index.device, dtype=experts.dtype)
        offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
        numbers = torch.arange(order.shape[0], device=index.device)
        places = torch.empty_like(order).scatter_(0, order, numbers)
        return cls(experts, order, places, offsets, index.shape[-1])

    def rows(self, tokens: Tensor) -> Tensor:
        """Each token as often as it has experts: [tokens, h] -> [rows, h]."""
        return tokens[self.order // self.top_k]

    def weights(self, top_k_weights: Tensor) -> Tensor:
        """[tokens, top k] -> [rows, 1]."""
        return top_k_weights.reshape(-1)[self.order].unsqueeze(-1)

    def unsorted(self, rows: Tensor) -> Tensor:
        """[rows, n] -> [tokens, top k, n]."""
        return rows[self.places].view(-1, self.top_k, rows.shape[-1])


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix: [rows, n] x [experts, n, m] -> [rows, m].

    Done by what transformers calls, which knows where PyTorch's grouped product does not run.
    """
    from transformers.integrations.moe import _grouped_mm  # noqa: PLC0415 (imports late)

    result: Tensor = _grouped_mm(rows, weight, offsets)
    return result


@dataclass(frozen=True, eq=False)
class Experts:
    """All experts of a layer: ``up``, then ``gate``, then ``down``, then ``finish`` if any."""

    up: Stack
    gate: Gate
    down: Stack
    finish: Gate | None = None

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run under autograd as it is: hidden [tokens, h], index and weights [tokens, top k].

        Differentiable in everything.
        """
        routing = Routing.of(index, self.up.weight.shape[0])
        rows = self.up(routing.rows(hidden), routing)
        return self._end(rows, routing, weights).to(hidden.dtype)

    def run_in_pieces(
        self, hidden: Tensor, index: Tensor, weights: Tensor, *, tokens: int
    ) -> Tensor:
        """The same result in pieces of at most ``tokens``; see the module docstring.

        Differentiable in ``hidden``, ``weights`` and the factors. Weights and biases get no
        gradient, and ``finish`` must be None.
        """
        assert self.finish is None
        if not torch.is_grad_enabled():
            out = torch.empty_like(hidden)
            for piece in _pieces(hidden.shape[0], tokens):
                out[piece] = self.run(hidden[piece], index[piece], weights[piece])
            return out
        tensors = [*self.up.tensors, *self.down.tensors]
        result: Tensor = _InPieces.apply(self, tokens, index, hidden, weights, *tensors)  # type: ignore[no-untyped-call]
        return result

    def work_bytes(self, hidden: Tensor, top_k: int, *, tokens: int) -> int:
        """What `run_in_pieces` takes at its worst moment beside what it keeps for backward.

        Of one piece in backward twice its rows (four times with factors or biases), what goes into
        the gate and comes out of it with their gradients; in forward three times its rows. Beside
        that the gradients of ``hidden`` and of the output. Factors' own gradients are left out.
        """
        rows = min(tokens, hidden.shape[0]) * top_k
        made, gated = self.up.width, self.down.width_in
        is_plain = all(t is None for s in (self.up, self.down) for t in s.tensors[1:])
        wide = hidden.shape[-1]
        backward = (2 if is_plain else 4) * wide + 3 * (made + gated)
        row = max(backward, 3 * wide + made) * hidden.element_size()
        return rows * row + 2 * hidden.nbytes

    def _end(self, rows: Tensor, routing: Routing, weights: Tensor) -> Tensor:
        """From the output of ``up`` to that of the layer."""
        rows = self.down(self.gate(rows), routing)
        if self.finish is not None:
            rows = self.finish(rows)
        return routing.unsorted(rows * routing.weights(weights)).sum(dim=1)

    def holding(self, tensors: Sequence[Any]) -> Experts:
        """The same of other tensors: those of ``up``, then those of ``down``."""
        half = len(tensors) // 2
        up, down = self.up.holding(*tensors[:half]), self.down.holding(*tensors[half:])
        return Experts(up, self.gate, down, self.finish)


class _InPieces(torch.autograd.Function):
    """`Experts.run_in_pieces`: saves what ``up`` gave for each piece.

    Weights are saved too: a shell may let go of them meanwhile, and asks autograd for them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        experts: Experts,
        tokens: int,
        index: Tensor,
        hidden: Tensor,
        weights: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        """Run piece by piece."""
        out = torch.empty_like(hidden)
        kept = []
        for piece in _pieces(hidden.shape[0], tokens):
            routing = Routing.of(index[piece], experts.up.weight.shape[0])
            rows = experts.up(routing.rows(hidden[piece]), routing)
            out[piece] = experts._end(rows, routing, weights[piece])
            kept.append(rows)
        ctx.save_for_backward(index, hidden, weights, *tensors, *kept)
        ctx.experts, ctx.tokens, ctx.num_tensors = experts, tokens, len(tensors)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run piece by piece; gradients of factors add up in fp32."""
        index, hidden, weights, *rest = ctx.saved_tensors
        kept = rest[ctx.num_tensors :]
        leaves = [None if t is None else t.detach() for t in rest[: ctx.num_tensors]]
        experts = ctx.experts.holding(leaves)
        sums = _Sums(leaves, (experts.up.factors, experts.down.factors))
        for_hidden, for_weights = torch.empty_like(hidden), torch.empty_like(weights)
        for piece, rows in zip(_pieces(hidden.shape[0], ctx.tokens), kept, strict=True):
            routing = Routing.of(index[piece], experts.up.weight.shape[0])
            below = _back_through(experts, routing, rows, weights[piece], gradient[piece], sums)
            for_weights[piece] = below.for_weights
            wide = _back_through_up(experts.up, routing, hidden[piece], below.for_rows, sums)
            for_hidden[piece] = routing.unsorted(wide).sum(dim=1)
        return None, None, None, for_hidden, for_weights, *sums.given()


@dataclass(frozen=True, eq=False)
class _Below:
    """Gradients of the output of ``up`` and of the routing weights."""

    for_rows: Tensor
    for_weights: Tensor


class _Sums:
    """Gradients of factors, added up over pieces. ``leaves``: all tensors, factors among them."""

    def __init__(self, leaves: Sequence[Tensor | None], factors: Sequence[Factors | None]) -> None:
        self._leaves = leaves  # keeps the ids theirs
        self._sums: dict[int, Tensor] = {}
        for pair in factors:
            for leaf in () if pair is None else (pair.a, pair.b):
                leaf.requires_grad_()

    def back(self, added: Tensor, rows: Tensor, factors: Factors | None, grad: Tensor) -> Tensor:
        """Take in the gradients of ``factors``; return that of ``rows``."""
        wanted = [rows] if factors is None else [rows, factors.a, factors.b]
        for_rows, *for_factors = torch.autograd.grad(added, wanted, grad)
        if factors is not None:
            self._add(factors.a, for_factors[0])
            self._add(factors.b, for_factors[1])
        return for_rows

    def _add(self, factor: Tensor, gradient: Tensor) -> None:
        before = self._sums.get(id(factor))
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        self._sums[id(factor)] = wide if before is None else before.add_(wide)

    def given(self) -> Iterator[Tensor | None]:
        """For each leaf its sum, in its dtype; None for what is frozen."""
        for leaf in self._leaves:
            total = None if leaf is None else self._sums.get(id(leaf))
            yield None if total is None else total.to(leaf.dtype)  # type: ignore[union-attr]


def _back_through(
    experts: Experts,
    routing: Routing,
    kept: Tensor,
    weights: Tensor,
    gradient: Tensor,
    sums: _Sums,
) -> _Below:
    """From the gradient of a piece's output to that of the output of ``up``."""
    down = experts.down
    with torch.enable_grad():
        leaf = kept.detach().requires_grad_()
        gated = experts.gate(leaf)
    inner = gated.detach()
    rows = routing.rows(gradient.to(inner.dtype))
    row_weights = routing.weights(weights)
    through = down.back(rows, routing)
    products = (through * inner).sum(dim=-1, dtype=row_weights.dtype)
    for_inner = (through * row_weights).to(inner.dtype)
    if down.bias is not None or down.factors is not None:
        with torch.enable_grad():
            inner.requires_grad_()
            added = down.added(inner, routing)
        assert added is not None
        products += (rows * added.detach()).sum(dim=-1, dtype=row_weights.dtype)
        if down.factors is not None:
            weighted = (rows * row_weights).to(rows.dtype)
            for_inner += sums.back(added, inner, down.factors, weighted)
    (for_rows,) = torch.autograd.grad(gated, leaf, for_inner)
    for_weights = products[routing.places].view(weights.shape)
    return _Below(for_rows, for_weights)


def _back_through_up(
    up: Stack, routing: Routing, hidden: Tensor, gradient: Tensor, sums: _Sums
) -> Tensor:
    """From the gradient of the output of ``up`` to that of its rows."""
    for_rows = up.back(gradient, routing)
    if up.factors is not None:
        with torch.enable_grad():
            rows = routing.rows(hidden).detach().requires_grad_()
            added = up.factors(rows, routing.offsets)
        for_rows += sums.back(added, rows, up.factors, gradient)
    return for_rows


def _pieces(length: int, most: int) -> Iterator[slice]:
    """Cut ``length`` tokens into pieces of at most ``most``, as even as can be."""
    count = max(-(-length // most), 1)
    size = -(-length // count)
    return (slice(begin, begin + size) for begin in range(0, max(length, 1), max(size, 1)))
