"""Logits that are not there do what a model does to logits, or say that they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from roundpipe.models.lazy_logits import ChunkedHead, LazyLogits, NotInChunks

BATCH, LENGTH, WIDTH, WORDS = 2, 7, 8, 20


class Twice(nn.Module):
    def forward(self, hidden):
        return hidden, hidden


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WORDS)


@pytest.fixture
def hidden():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


LABELS = (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 3) % WORDS


def as_in_transformers(logits):
    """Its loss of causal LMs, shifted by padding the labels."""
    logits = logits.float()
    labels = F.pad(LABELS, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="sum") / 3


def as_of_old(logits):
    """Logits shifted and flattened by hand."""
    shifted = logits[..., :-1, :].contiguous()
    loss_fct = nn.CrossEntropyLoss()
    return loss_fct(shifted.view(-1, shifted.size(-1)), LABELS[..., 1:].reshape(-1))


def capped(logits):
    logits = torch.tanh(logits / 3.0) * 3.0
    return as_in_transformers(logits)


def scaled_and_shifted(logits):
    words = torch.linspace(-1, 1, WORDS)
    logits = 0.5 * logits.to(torch.float32) + words - words.view(1, 1, -1) * 0.5
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), ignore_index=3)


def in_two_parts(logits):
    return F.cross_entropy(logits[0], LABELS[0]) + F.cross_entropy(logits[1, 2:], LABELS[1, 2:])


UNDERSTOOD = [as_in_transformers, as_of_old, capped, scaled_and_shifted, in_two_parts]


@pytest.mark.parametrize("loss_of", UNDERSTOOD, ids=lambda f: f.__name__)
def test_what_models_do_between_head_and_loss_is_done_by_chunks(loss_of, head, hidden):
    leaf = hidden.clone().requires_grad_()
    plain = loss_of(head(leaf))
    wanted = torch.autograd.grad(plain, [leaf, head.weight, head.bias])
    with ChunkedHead(head, rows=3):
        ours = loss_of(head(leaf))
    assert not isinstance(ours, LazyLogits)
    found = torch.autograd.grad(ours, [leaf, head.weight, head.bias])
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_under_autocast_the_weight_gets_its_gradient(head, hidden):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with ChunkedHead(head, rows=3):
            ours = as_in_transformers(head(hidden))
        ours.backward()
        found = head.weight.grad.clone()
        head.zero_grad()
        as_in_transformers(head(hidden)).backward()
    torch.testing.assert_close(found, head.weight.grad, rtol=0.02, atol=0.02)


def test_they_answer_what_they_would_be(head, hidden):
    with ChunkedHead(head.bfloat16()):
        logits = head(hidden.bfloat16())
    assert logits.shape == (BATCH, LENGTH, WORDS)
    assert (logits.size(-1), logits.dim(), len(logits)) == (WORDS, 3, BATCH)
    assert (logits.dtype, logits.float().dtype) == (torch.bfloat16, torch.float32)
    assert logits.device == hidden.device
    with torch._C.DisableTorchFunctionSubclass():
        assert logits.untyped_storage().nbytes() <= 4  # and none of it is there


REFUSED = {
    "a sum over words": lambda x: x.logsumexp(-1),
    "a softmax": lambda x: F.softmax(x, -1),
    "a question about values": lambda x: bool((x > 0).any()),
    "some words only": lambda x: x[..., : WORDS - 2],
    "one word": lambda x: x[..., 0],
    "words in place of rows": lambda x: x.reshape(-1, 2 * WORDS),
    "rows turned": lambda x: x.transpose(1, 2),
    "writing to them": lambda x: x.mul_(2.0),
    "writing to some": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "logits times logits": lambda x: x * x,
    "a factor for each token": lambda x: x * torch.ones(BATCH, LENGTH, 1),
    "a trained factor": lambda x: x * nn.Parameter(torch.ones(())),
    "smoothed labels": lambda x: F.cross_entropy(
        x.view(-1, WORDS), LABELS.view(-1), label_smoothing=0.1
    ),
    "weighed words": lambda x: F.cross_entropy(
        x.view(-1, WORDS), LABELS.view(-1), weight=torch.ones(WORDS)
    ),
    "a loss for each token": lambda x: F.cross_entropy(
        x.view(-1, WORDS), LABELS.view(-1), reduction="none"
    ),
    "a loss in 16 bits": lambda x: F.cross_entropy(x.half().view(-1, WORDS), LABELS.view(-1)),
    "soft labels": lambda x: F.cross_entropy(x[0], torch.rand(LENGTH, WORDS)),
    "another language": lambda x: x.tolist(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_ends_the_forward(what, head, hidden):
    with pytest.raises(NotInChunks), ChunkedHead(head):
        REFUSED[what](head(hidden))
    assert "forward" not in vars(head)  # and the head is itself again
    assert type(head(hidden)) is torch.Tensor


@pytest.mark.parametrize(
    "call", [lambda m, x: m(x, 1), lambda m, x: m(input=x), lambda m, x: m(x[0, 0])]
)
def test_a_head_that_is_called_otherwise_ends_the_forward(call, head, hidden):
    with pytest.raises(NotInChunks), ChunkedHead(head):
        call(head, hidden)


def test_a_head_that_returns_more_than_logits_ends_the_forward(hidden):
    module = Twice()
    with pytest.raises(NotInChunks), ChunkedHead(module):
        module(hidden)


def test_a_length_equal_to_the_vocabulary_confuses_nothing(head):
    hidden = torch.randn(BATCH, WORDS, WIDTH)
    with ChunkedHead(head):
        logits = head(hidden)
        with pytest.raises(NotInChunks):
            logits[..., 0]
        assert logits[:, 0].shape == (BATCH, WORDS)


def test_hooks_of_a_head_keep_it_from_chunks(head):
    assert ChunkedHead.can_be(head)
    head.register_forward_hook(lambda *_: None)
    assert not ChunkedHead.can_be(head)


def test_nothing_is_drawn_to_see_what_a_head_returns(hidden):
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WORDS)).train()
    state = torch.random.get_rng_state()
    with ChunkedHead(module):
        module(hidden)
    assert torch.equal(torch.random.get_rng_state(), state)
