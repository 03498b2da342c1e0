"""Plain PyTorch loops to compare with, tiny models to run, and a wrapper that is closed at the end.

"Plain" is what one writes without this library: a loop over the same microbatches, each one's loss
a share of the step's, then one optimizer step.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe

# peft asks for an attribute by its old name
WARNING = "ignore:.is_gradient_checkpointing.:FutureWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(WARNING))


@pytest.fixture(autouse=True)
def _bits(bits_of_torch):
    """Optimizers of ours have the bits of torch's."""


@pytest.fixture(autouse=True)
def _one_thread():
    """The same sums whatever runs them: each CPU device gets one thread, the plain loop too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Plain:
    """A model and the loop one would write for it.

    ``loss_fn(outputs, labels)``: None for a causal LM that gets its labels among the inputs.
    16-bit gradients add up in fp32, in microbatch order.
    """

    def __init__(self, model, loss_fn=None):
        self.model, self.loss_fn = model, loss_fn
        self.sums = {}
        self.losses = []

    def forward_backward(self, batch, num_microbatch, *, tokens=None, around=nullcontext):
        """The sum of the microbatches' losses; gradients are added to ``sums``."""
        if self.loss_fn is None and tokens is None:
            tokens = int((batch["labels"][:, 1:] != -100).sum())
        total = None
        for microbatch, piece in enumerate(pieces(batch, num_microbatch)):
            with around(microbatch) if around is not nullcontext else nullcontext():
                if self.loss_fn is None:
                    loss = self.model(**piece, num_items_in_batch=tokens, use_cache=False).loss
                else:
                    loss = self.loss_fn(self.model(piece["x"]), piece["y"])
            loss.backward()
            self.collect()
            total = loss.detach() if total is None else total + loss.detach()
        self.losses.append(total)
        return total

    def collect(self):
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
                parameter.grad = None

    def gradients(self):
        """The sums in the parameters' dtype; empty afterwards."""
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        found = {name: grad.to(dtypes[name]) for name, grad in self.sums.items()}
        self.sums = {}
        return found

    def step(self, optimizer, max_norm=None):
        """One step over working weights that are the masters; returns the norm before clipping."""
        named = dict(self.model.named_parameters())
        for name, grad in self.gradients().items():
            named[name].grad = grad
        norm = None
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm


def pieces(batch, num_microbatch):
    """A batch as its microbatches: as even as can be, larger ones first."""
    size = len(next(iter(batch.values())))
    cut = {k: v.tensor_split(min(size, num_microbatch)) for k, v in batch.items()}
    return [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]


@pytest.fixture
def plain():
    return Plain


@pytest.fixture
def pieces_of():
    return pieces


@pytest.fixture
def wrap():
    """``wrap(model, n)``: a RoundPipe over n CPU devices, closed at the end of the test."""
    made = []

    def make(model, devices=1, **settings):
        given = ["cpu"] * devices if isinstance(devices, int) else devices
        made.append(roundpipe.RoundPipe(model, devices=given, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def cut_in(num_microbatch=None, **more):
    return roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch, **more)


@pytest.fixture
def split_in():
    """``split_in(4)``: the config of a call in four microbatches."""
    return cut_in


@pytest.fixture
def train_lm():
    """One training call of a causal LM."""

    def train(wrapped, batch, num_microbatch=None, return_outputs=False, **more):
        return wrapped.forward_backward(
            input_kwargs=batch,
            return_outputs=return_outputs,
            run_config=cut_in(num_microbatch, **more),
        )

    return train


@pytest.fixture
def train_xy():
    """One training call of a Sequential with a loss function."""

    def train(wrapped, batch, loss_fn, num_microbatch=None, return_outputs=False, **more):
        return wrapped.forward_backward(
            (batch["x"],),
            label=batch["y"],
            loss_fn=loss_fn,
            return_outputs=return_outputs,
            run_config=cut_in(num_microbatch, **more),
        )

    return train


def llama(*, tied=False, layers=4, dtype=torch.float32, **settings):
    """A tiny Llama with fixed weights, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).train()


@pytest.fixture
def tiny_llama():
    return llama


class Block(nn.Module):
    """A residual block, so that a boundary's gradient has two contributions."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


def tower(*, blocks=4, dropout=0.0, dtype=torch.float32, width=16):
    """A Sequential of residual blocks between two matrices, with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [Block(width, dropout) for _ in range(blocks)]
        return nn.Sequential(nn.Linear(8, width), *middle, nn.Linear(width, 4)).to(dtype)


@pytest.fixture
def tiny_tower():
    return tower


def squares(outputs, labels):
    """A sum of squares: adds up over samples without any factor."""
    return (outputs - labels).float().square().sum()


@pytest.fixture
def square_loss():
    return squares


class Batches:
    """Random batches with fixed seeds."""

    def sequences(self, lengths, seed=0, masked=0.3):
        """Sequences padded on the right, with labels masked at random; one label at least each."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(lengths), max(lengths))
        ids = torch.randint(3, 96, shape, generator=generator)
        mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
        off = torch.rand(shape, generator=generator) < masked
        off[:, 1] = False
        labels = ids.masked_fill((mask == 0) | off, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def points(self, size, seed=0, dtype=torch.float32):
        """Inputs [size, 8] and targets [size, 4]."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 8, generator=generator).to(dtype)
        return {"x": x, "y": torch.randn(size, 4, generator=generator).to(dtype)}


@pytest.fixture
def batches():
    return Batches()


def assert_equal(found, expected):
    """Two dicts of tensors: the same names and bits."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different


@pytest.fixture
def same_bits():
    return assert_equal


def assert_close(found, expected, tolerance=1e-6):
    """Two dicts of tensors, to ``tolerance`` of each tensor's largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1e-3)
        error = (found[name].float() - value.float()).abs().max().item() / scale
        assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.fixture
def close_to():
    return assert_close


def cloned(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.fixture
def copies():
    """Clones of a dict of tensors, for views that the next step overwrites."""
    return cloned


@pytest.fixture
def twin():
    """A copy of a model, to train beside it."""
    return copy.deepcopy


@pytest.fixture(scope="session")
def smollm2():
    """The functions of ``smollm2.py``."""
    place = Path(__file__).with_name("smollm2.py")
    spec = importlib.util.spec_from_file_location("smollm2", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules["smollm2"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
