"""Models that are no chain, and the plain loops to compare them with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe


@pytest.fixture(autouse=True)
def _one_thread():
    """The same sums whatever runs them: each CPU device gets one thread, the plain loop too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, time):
        return x + self.drop(self.conv(torch.relu(self.norm(x))) * time[:, None, None])


class UNet(nn.Module):
    """Skips, nested lists, arithmetic between blocks, an embedding of the time."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))
        self.first = nn.Conv1d(2, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.ModuleList([Block(width, dropout), Block(width, dropout)]) for _ in range(2)
        )
        self.up = nn.ModuleList(nn.ModuleList([Block(width, dropout)]) for _ in range(2))
        self.mix = nn.ModuleList(nn.Conv1d(2 * width, width, 1) for _ in range(2))
        self.last = nn.Conv1d(width, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, x, when):
        time = self.time(when[:, None])[:, 0]
        x, skips = self.first(x * self.scale), []
        for first, second in self.down:
            x = second(first(x, time), time)
            skips.append(x)
            x = torch.nn.functional.avg_pool1d(x, 2)
        for mix, (block,) in zip(self.mix, self.up, strict=True):
            x = torch.nn.functional.interpolate(x, scale_factor=2)
            x = block(mix(torch.cat([x, skips.pop()], dim=1)), time)
            x += 0.5
        return self.last(x) * self.scale


class TwoTowers(nn.Module):
    """Two encoders that share a projection, and a temperature of their own."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 16))
        self.project_left = nn.Linear(16, 8, bias=False)
        self.project_right = nn.Linear(16, 8, bias=False)
        self.project_right.weight = self.project_left.weight
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, a, b):
        left = self.project_left(self.left(a))
        right = self.project_right(self.right(b))
        return left * self.temperature.exp(), right


class MLP(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.one = nn.Linear(6, 16)
        self.drop = nn.Dropout(dropout)
        self.two = nn.Linear(16, 16)
        self.three = nn.Linear(16, 2)

    def forward(self, x):
        return self.three(torch.relu(self.two(self.drop(torch.relu(self.one(x))))))


def _made(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs)


@pytest.fixture
def unet():
    return lambda **settings: _made(UNet, **settings)


@pytest.fixture
def two_towers():
    return lambda: _made(TwoTowers)


@pytest.fixture
def mlp():
    return lambda **settings: _made(MLP, **settings)


@pytest.fixture
def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    def make(**settings):
        config = T5Config(
            vocab_size=96,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **settings,
        )
        return _made(T5ForConditionalGeneration, config).train()

    return make


@pytest.fixture
def tiny_bart():
    from transformers import BartConfig, BartForConditionalGeneration

    def make():
        config = BartConfig(
            vocab_size=96,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
        )
        return _made(BartForConditionalGeneration, config).train()

    return make


@pytest.fixture
def pairs_of_text():
    """A source with padding and a target, whose microbatches have different numbers of tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 96, (5, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = torch.randint(3, 96, (5, 7), generator=generator)
    labels[0, 2:] = -100
    labels[3, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def wrap():
    """``wrap(model, devices, **settings)``, closed at the end of the test."""
    made = []

    def make(model, devices=2, num_microbatch=2, **settings):
        config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch)
        wrapped = roundpipe.wrap_model_to_roundpipe(
            model, devices=["cpu"] * devices, model_run_config=config, **settings
        )
        made.append(wrapped)
        return wrapped

    yield make
    for each in made:
        each.close()


@pytest.fixture
def noise():
    def make(size=5):
        generator = torch.Generator().manual_seed(size)
        return (
            torch.randn(size, 2, 16, generator=generator),
            torch.rand(size, generator=generator),
        )

    return make


@pytest.fixture
def plain_gradients():
    """``plain_gradients(model, loss)``: of a copy, with the loss that ``loss(copy)`` makes."""

    def make(model, loss):
        plain = copy.deepcopy(model)
        loss(plain).backward()
        return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    return make
