"""Grouped products give what a loop over experts gives, and keep one product for backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.models.estimate.meter import Meter
from roundpipe.models.grouped import Experts, Factors, Routing, Stack, tokens_in_piece

TOKENS, TOP_K, HIDDEN, INNER = 37, 3, 16, 8


def gate(rows):
    left, right = rows.chunk(2, dim=-1)
    return silu(left) * right


def made(seed=0, *, experts=6, rank=None, bias=False, transposed=False, dtype=torch.float32):
    """Experts with fixed weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def stack(inner, outer):
        weight = draw(experts, outer, inner)
        factors = None
        if rank:
            a, b = draw(experts, rank, inner), draw(experts, outer, rank)
            factors = Factors.of([(a.requires_grad_(), b.requires_grad_())])
        weight = weight.transpose(1, 2).contiguous() if transposed else weight
        return Stack(weight, draw(experts, outer) if bias else None, factors, transposed)

    return Experts(stack(HIDDEN, 2 * INNER), gate, stack(INNER, HIDDEN))


def given(seed=1, *, experts=6, tokens=TOKENS, dtype=torch.float32):
    """Hidden states, and for each token distinct experts and their weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.topk(TOP_K, dim=-1)
    return hidden.requires_grad_(), index, weights.to(dtype).requires_grad_()


def by_loop(experts, hidden, index, weights):
    """Token by token and expert by expert, from weights and factors."""

    def linear(stack, row, expert):
        weight = stack.weight[expert]
        out = row @ (weight if stack.is_transposed else weight.T)
        if stack.bias is not None:
            out = out + stack.bias[expert]
        if stack.factors is not None:
            out = out + row @ stack.factors.a[expert].T @ stack.factors.b[expert].T
        return out

    rows = []
    for token in range(hidden.shape[0]):
        total = torch.zeros(HIDDEN, dtype=hidden.dtype)
        for place in range(TOP_K):
            expert = index[token, place]
            inner = gate(linear(experts.up, hidden[token], expert))
            total = total + linear(experts.down, inner, expert) * weights[token, place]
        rows.append(total)
    return torch.stack(rows)


def gradients(experts, run, arguments):
    hidden, _, weights = arguments
    out = run(*arguments)
    pull = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view_as(out).to(out.dtype)
    stacks = (experts.up, experts.down)
    factors = [t for s in stacks if s.factors for t in (s.factors.a, s.factors.b)]
    return [out, *torch.autograd.grad(out, [hidden, weights, *factors], pull)]


def assert_same(ours, wanted, *, within=1e-6):
    """Within rounding of the largest element: sums run in another order."""
    for left, right in zip(ours, wanted, strict=True):
        largest = right.abs().max().item()
        torch.testing.assert_close(left, right, rtol=0, atol=within * max(largest, 1e-30))


FORMS = {
    "plain": {},
    "biases": {"bias": True},
    "transposed": {"bias": True, "transposed": True},
    "factors": {"rank": 4},
    "all": {"rank": 4, "bias": True, "transposed": True},
}


def test_rows_are_sorted_by_expert_and_found_again():
    index = torch.tensor([[2, 0], [0, 3], [2, 3]])
    routing = Routing.of(index, 5)
    assert routing.experts.tolist() == [0, 0, 2, 2, 3, 3]
    assert routing.offsets.tolist() == [2, 2, 4, 6, 6]
    assert routing.offsets.dtype == torch.int32
    tokens = torch.arange(3.0).unsqueeze(-1)
    assert routing.rows(tokens).flatten().tolist() == [0, 1, 0, 2, 1, 2]
    assert torch.equal(routing.unsorted(routing.rows(tokens)), tokens.expand(3, 2).unsqueeze(-1))


@pytest.mark.parametrize("form", FORMS)
def test_one_product_for_all_experts_equals_a_loop(form):
    experts = made(**FORMS[form])
    ours = gradients(experts, experts.run, given())
    wanted = gradients(experts, lambda *a: by_loop(experts, *a), given())
    assert_same(ours, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 10, 36, TOKENS, 1000])
def test_pieces_equal_the_whole_and_so_do_their_gradients(form, tokens):
    experts = made(**FORMS[form])

    def in_pieces(*arguments):
        return experts.run_in_pieces(*arguments, tokens=tokens)

    ours = gradients(experts, in_pieces, given())
    assert_same(ours, gradients(experts, experts.run, given()))
    with torch.no_grad():
        assert torch.equal(ours[0], in_pieces(*given()))


def test_no_token_at_all_gives_nothing_and_gradients_of_nothing():
    experts = made(rank=4)
    hidden, index, weights = given(tokens=0)
    out = experts.run_in_pieces(hidden, index, weights, tokens=5)
    out.sum().backward()
    assert out.shape == hidden.grad.shape == (0, HIDDEN)


def test_gradients_of_factors_add_up_in_fp32_over_pieces():
    dtype = torch.bfloat16
    experts = made(rank=8, dtype=dtype)

    def in_pieces(*arguments):
        return experts.run_in_pieces(*arguments, tokens=1)

    ours = gradients(experts, in_pieces, given(dtype=dtype))
    whole = gradients(experts, lambda *a: experts.run_in_pieces(*a, tokens=99), given(dtype=dtype))
    assert {each.dtype for each in ours} == {dtype}
    assert_same(ours, whole, within=0.01)  # a few roundings to 8 bits; 37 of them would be more


@pytest.mark.parametrize("rank", [1, 3, 5, 8])
def test_ranks_are_padded_to_what_grouped_products_take(rank):
    a, b = torch.randn(4, rank, 8), torch.randn(4, 12, rank)
    factors = Factors.of([(a, b), (a, b)])
    assert factors.a.shape[1] % 4 == 0
    rows = torch.randn(4, 8)
    offsets = torch.arange(1, 5, dtype=torch.int32)
    wanted = torch.stack([2 * b[i] @ a[i] @ rows[i] for i in range(4)])
    torch.testing.assert_close(factors(rows, offsets), wanted, rtol=1e-4, atol=1e-4)


class Bytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd saves, each storage once, but those of ``outside``."""

    def __init__(self, outside):
        self._outside = {t.untyped_storage().data_ptr() for t in outside}
        self._saved = {}
        super().__init__(self._pack, lambda t: t)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._outside:
            self._saved[storage.data_ptr()] = storage
        return tensor

    @property
    def total(self):
        return sum(storage.nbytes() for storage in self._saved.values())


def test_pieces_keep_what_the_first_product_gave_and_nothing_else():
    experts, arguments = made(rank=4), given()
    stacks = (experts.up, experts.down)
    outside = [*arguments, *(t for s in stacks for t in (s.weight, s.factors.a, s.factors.b))]
    plain, ours = Bytes(outside), Bytes(outside)
    with plain:
        experts.run(*arguments)
    with ours:
        experts.run_in_pieces(*arguments, tokens=10)
    rows = TOKENS * TOP_K
    assert ours.total == rows * 2 * INNER * 4
    assert plain.total > 3 * ours.total


class Seen(TorchDispatchMode):
    """How many operations ran, and the elements of the largest tensor that one made."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sides", [(64, 64), (256, 64), (64, 256)], ids=str)
def test_pieces_take_what_they_say_for_a_moment(form, sides, monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", sides[0])
    monkeypatch.setitem(globals(), "INNER", sides[1])
    experts, (hidden, index, weights) = made(**FORMS[form]), given(tokens=256)
    said = experts.work_bytes(hidden, TOP_K, tokens=64)
    there = [t for s in (experts.up, experts.down) for t in s.tensors if t is not None]
    factors = [tensor for tensor in there if tensor.requires_grad]
    with (
        Meter([*there, hidden, index, weights], torch.float32) as meter,
        torch.autograd.set_multithreading_enabled(False),
    ):
        out = experts.run_in_pieces(hidden, index, weights, tokens=64)
        kept = meter.num_alive
        out.backward(torch.ones_like(out))
        most = max(meter.counts.alive) - kept
        most -= sum(2 * factor.nbytes for factor in factors)
    assert 0.75 * said < most <= 1.02 * said


@pytest.mark.parametrize("rank", [None, 4])
def test_operations_do_not_grow_with_the_number_of_experts(rank):
    counts = []
    for number in (8, 128):
        experts = made(experts=number, rank=rank)
        with Seen() as seen:
            gradients(
                experts,
                lambda *a, e=experts: e.run_in_pieces(*a, tokens=20),
                given(experts=number),
            )
        counts.append(seen.count)
    assert counts[0] == counts[1]


def test_a_piece_is_so_many_tokens_that_their_rows_take_half_a_gibibyte():
    assert tokens_in_piece(8, 4096 * 2) == 8192
    assert tokens_in_piece(8, 2**40) == 1
