"""Loss and gradients made in chunks of tokens, against those of all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from roundpipe.models import chunked_loss
from roundpipe.models.chunked_loss import (
    FROZEN_ROWS,
    TRAINED_ROWS,
    Head,
    Step,
    Targets,
    chunked_cross_entropy,
    most_whole_tokens,
    rows_of_chunk,
)
from roundpipe.models.estimate.meter import Meter

TOKENS, WIDTH, WORDS, ROWS = 29, 8, 50, 6  # no number of chunks divides the tokens


def capped(logits):
    return 3.0 * torch.tanh(logits / 3.0)


class Beside(nn.Module):
    """A frozen product with a trained one of low rank beside it, as adapters are."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WORDS).requires_grad_(False)
        self.inner = nn.Linear(WIDTH, 2, bias=False)
        self.outer = nn.Linear(2, WORDS, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + 2.0 * self.outer(self.inner(hidden))


HEADS = {
    "product": lambda: nn.Linear(WIDTH, WORDS, bias=False),
    "with bias": lambda: nn.Linear(WIDTH, WORDS),
    "frozen": lambda: nn.Linear(WIDTH, WORDS).requires_grad_(False),
    "adapter": Beside,
}


def setting(module, *, ignored=0.3, dtype=torch.float32, tokens=TOKENS):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    words = torch.randint(WORDS, (tokens,), generator=generator)
    words[torch.rand(tokens, generator=generator) < ignored] = -100
    return module.to(dtype), hidden, words


def gradients(module, hidden, make):
    """The loss, and its gradients by the hidden state and by what is trained."""
    leaf = hidden.clone().requires_grad_()
    loss = make(leaf)
    loss.backward()
    found = [leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)]
    module.zero_grad(set_to_none=True)
    return [loss.detach(), *found]


def both(module, hidden, words, *, reduction="mean", steps=(), rows=ROWS, factor=1.0):
    def whole(leaf):
        logits = module(leaf)
        for step in steps:
            logits = step(logits)
        return factor * F.cross_entropy(logits.float(), words, reduction=reduction)

    def cut(leaf):
        head = Head(module, module.forward, tuple(map(Step, steps)), rows)
        targets = Targets(words=words, is_mean=reduction == "mean")
        return factor * chunked_cross_entropy(head, leaf, targets, torch.float32)

    return gradients(module, hidden, whole), gradients(module, hidden, cut)


def assert_close(plain, ours, tolerance=1e-6):
    for one, two in zip(plain, ours, strict=True):
        assert one.dtype == two.dtype
        assert (one - two).abs().max() <= tolerance * max(one.abs().max().item(), 1e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("steps", [(), (capped,), (torch.tanh,)], ids=["plain", "capped", "tanh"])
@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_equal_those_of_all_logits(kind, steps, reduction):
    torch.manual_seed(0)
    module, hidden, words = setting(HEADS[kind]())
    assert_close(*both(module, hidden, words, reduction=reduction, steps=steps, factor=0.3))


def test_a_chunk_without_trained_tokens_changes_nothing():
    torch.manual_seed(0)
    module, hidden, words = setting(nn.Linear(WIDTH, WORDS))
    words[: 2 * ROWS] = -100
    plain, ours = both(module, hidden, words)
    assert_close(plain, ours)
    assert not ours[1][: 2 * ROWS].any()


@pytest.mark.parametrize("kind", ["product", "adapter"])
def test_without_any_trained_token_gradients_are_zero_and_a_mean_is_no_number(kind):
    module, hidden, words = setting(HEADS[kind](), ignored=1.1)
    plain, ours = both(module, hidden, words)
    assert plain[0].isnan()
    assert ours[0].isnan()
    assert not any(gradient.any() for gradient in (*plain[1:], *ours[1:]))
    assert both(module, hidden, words, reduction="sum")[1][0] == 0.0


@pytest.mark.parametrize("kind", ["product", "adapter"])
def test_words_that_are_masked_out_have_no_probability(kind):
    module, hidden, words = setting(HEADS[kind]())
    words[words == 7] = 8
    masked = torch.zeros(WORDS).index_fill_(0, torch.tensor([7]), float("-inf"))
    assert_close(*both(module, hidden, words, steps=(lambda logits: logits + masked,)))


@pytest.mark.parametrize("kind", ["product", "adapter"])
def test_what_many_chunks_add_to_a_16_bit_weight_is_not_rounded_each_time(kind):
    torch.manual_seed(0)
    module, hidden, words = setting(HEADS[kind](), tokens=600, ignored=0.0)
    module.to(torch.bfloat16)
    hidden = hidden.bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32 if parameter.requires_grad else None
    exact = gradients(
        module.float(),
        hidden.float(),
        lambda leaf: F.cross_entropy(module(leaf), words, reduction="sum"),
    )
    module.bfloat16()

    def cut(leaf):
        head = Head(module, module.forward, (Step(torch.Tensor.float, is_upcast=True),), 2)
        return chunked_cross_entropy(head, leaf, Targets(words=words, is_mean=False), torch.float32)

    ours = gradients(module, hidden, cut)
    assert ours[1].dtype == torch.bfloat16
    for one, two in zip(exact[2:], ours[2:], strict=True):
        assert two.dtype == torch.float32
        # 300 chunks summed in bf16 are off by several percent
        assert (one - two).norm() <= 0.01 * one.norm()


def test_small_probabilities_survive_in_fp16():
    torch.manual_seed(0)
    module, hidden, words = setting(nn.Linear(WIDTH, WORDS), ignored=0.0)
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)
    words[:] = 0
    module.bias.data[0] = 16.0  # all other words have a probability of 1e-7
    exact, _ = both(module, hidden, words)
    module.half()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32

    def cut(leaf):
        head = Head(module, module.forward, (Step(torch.Tensor.float, is_upcast=True),), ROWS)
        return chunked_cross_entropy(head, leaf, Targets(words=words), torch.float32)

    ours = gradients(module, hidden.half(), cut)
    for one, two in zip(exact[2:], ours[2:], strict=True):
        # without a scale they are one or two times the smallest number of fp16
        assert (one - two)[1:].norm() <= 0.03 * one[1:].norm()


def test_under_autocast_the_weight_gets_its_gradient_through_the_cast():
    torch.manual_seed(0)
    module, hidden, words = setting(nn.Linear(WIDTH, WORDS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, ours = both(module, hidden, words)
    assert_close(plain, ours, tolerance=0.02)  # bf16 products, rounded in another order


def test_without_gradient_there_is_a_loss_and_no_graph():
    module, hidden, words = setting(nn.Linear(WIDTH, WORDS))
    head = Head(module, module.forward, rows=ROWS)
    with torch.no_grad():
        loss = chunked_cross_entropy(head, hidden, Targets(words=words), torch.float32)
        want = F.cross_entropy(module(hidden), words)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)


def test_a_second_backward_is_refused():
    module, hidden, words = setting(nn.Linear(WIDTH, WORDS))
    head = Head(module, module.forward, rows=ROWS)
    loss = chunked_cross_entropy(head, hidden, Targets(words=words), torch.float32)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        loss.backward()


def test_the_same_shapes_give_the_same_bits():
    module, hidden, words = setting(Beside())
    first, second = both(module, hidden, words)[1], both(module, hidden, words)[1]
    assert all(map(torch.equal, first, second))


def test_chunks_are_even_and_of_whole_tiles():
    assert [rows_of_chunk(n, trained=True) for n in (1, 128, 129, 2048, 2049, 4096, 16384)] == [
        *(128, 128, 256, 2048, 1152, 2048, 2048)
    ]
    assert rows_of_chunk(16384, trained=False) == FROZEN_ROWS
    for tokens in range(1, 9000, 37):
        assert rows_of_chunk(tokens, trained=True) <= TRAINED_ROWS
    assert most_whole_tokens(128_000) == 524


def live_bytes(device, *, tokens, words, width, trained, dtype=torch.bfloat16):
    """The most bytes alive while a loss is made and differentiated, of what is made for it."""
    module = nn.Linear(width, words, bias=False, device=device, dtype=dtype)
    module.requires_grad_(trained)
    if trained:
        module.weight.grad_dtype = torch.float32
    hidden = torch.zeros(tokens, width, device=device, dtype=dtype, requires_grad=True)
    targets = Targets(words=torch.zeros(tokens, device=device, dtype=torch.long))
    head = Head(module, module.forward, (Step(torch.Tensor.float, is_upcast=True),))
    with Meter([module.weight, hidden, targets.words], dtype) as meter:
        loss = chunked_cross_entropy(head, hidden, targets, torch.float32)
        loss.backward()
    return max(meter.counts.alive), max(head.work_bytes)


def plain_bytes(tokens, words, width):
    """The same of all logits at once, without data."""
    weight = torch.empty(words, width, device="meta", dtype=torch.bfloat16)
    hidden = torch.empty(tokens, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, device="meta", dtype=torch.long)
    with Meter([weight, hidden, targets], torch.bfloat16) as meter:
        F.cross_entropy(F.linear(hidden, weight).float(), targets).backward()
    return max(meter.counts.alive)


@pytest.mark.parametrize("trained", [True, False])
def test_16k_tokens_of_128k_words_take_one_chunk(trained):
    tokens, words, width = 16384, 128_000, 64
    live, noted = live_bytes("meta", tokens=tokens, words=words, width=width, trained=trained)
    rows = TRAINED_ROWS if trained else FROZEN_ROWS
    assert noted == 6 * rows * words  # logits in bf16, and fp32 probabilities
    beside = 3 * tokens * width * 2 + (2 * words * width * 4 if trained else 0)  # gradients
    assert live <= noted + beside + 64 * rows
    assert 12 * live < plain_bytes(tokens, words, width)


def test_bytes_with_data_are_those_without(monkeypatch):
    monkeypatch.setattr(chunked_loss, "TRAINED_ROWS", 64)
    monkeypatch.setattr(chunked_loss, "_TILE", 16)
    shape = {"tokens": 600, "words": 2000, "width": 16, "trained": True, "dtype": torch.float32}
    assert live_bytes("cpu", **shape) == live_bytes("meta", **shape)


@pytest.mark.accept  # 40 s: two billion logits
def test_16k_tokens_of_128k_words_take_one_chunk_on_the_cpu():
    live, noted = live_bytes("cpu", tokens=16384, words=128_000, width=64, trained=True)
    assert noted == 6 * TRAINED_ROWS * 128_000
    assert live < 1.15 * noted


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("kind", ["product", "with bias", "adapter"])
def test_on_a_card_gradients_are_those_of_the_cpu(kind):
    torch.manual_seed(0)
    module, hidden, words = setting(HEADS[kind](), tokens=600, dtype=torch.bfloat16)
    found = []
    for device in ("cpu", "cuda"):
        module.to(device)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32 if parameter.requires_grad else None
        head = Head(module, module.forward, (Step(torch.Tensor.float, is_upcast=True),), 64)
        targets = Targets(words=words.to(device))
        found.append(
            gradients(
                module,
                hidden.to(device),
                lambda leaf, h=head, t=targets: chunked_cross_entropy(h, leaf, t, torch.float32),
            )
        )
    for one, two in zip(*found, strict=True):
        assert one.dtype == two.dtype
        assert (one - two.cpu()).norm() <= 0.01 * one.norm()
