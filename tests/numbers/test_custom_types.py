"""Types of the user's own travel as inputs, labels, boundaries and outputs, gradients too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput


class Node:
    """A class like any other, made known to pytrees."""

    def __init__(self, main, side, note):
        self.main, self.side, self.note = main, side, note


pytree.register_pytree_node(
    Node,
    lambda node: ((node.main, node.side), node.note),
    lambda children, note: Node(*children, note),
)


@dataclass
class Record:
    main: torch.Tensor
    side: torch.Tensor
    note: str = ""


pytree.register_dataclass(Record)


class Named(NamedTuple):
    main: torch.Tensor
    side: torch.Tensor
    note: str = ""


@dataclass
class Output(ModelOutput):
    main: torch.Tensor | None = None
    side: torch.Tensor | None = None
    note: str | None = None


def a_dict(main, side, note):
    return {"main": main, "side": side, "note": note}


MAKERS = {"node": Node, "dataclass": Record, "named tuple": Named, "output": Output, "dict": a_dict}


def read(value, name):
    return value[name] if isinstance(value, dict) else getattr(value, name)


class Mixing(nn.Module):
    """Takes and returns one such value; both of its tensors carry a gradient."""

    def __init__(self, make, width=4):
        super().__init__()
        self.make = make
        self.main, self.side = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, value):
        main, side = read(value, "main"), read(value, "side")
        return self.make(self.main(main) + side, torch.tanh(self.side(side)), read(value, "note"))


def loss_of(outputs, labels):
    error = read(outputs, "main") - read(labels, "main")
    return error.square().sum() + (read(outputs, "side") * read(labels, "side")).sum()


def values(make):
    tensors = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    return make(tensors[0], tensors[1], "in"), make(tensors[2], tensors[3], "label")


def chain(make):
    torch.manual_seed(0)
    return nn.Sequential(*[Mixing(make) for _ in range(3)])


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_they_train_as_in_a_plain_loop(kind, num_devices, wrap, split_in):
    make = MAKERS[kind]
    model = chain(make)
    given, labels = values(make)
    output = model(given)
    loss = loss_of(output, labels)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    wrapped = wrap(model, num_devices)
    found, outputs = wrapped.forward_backward(
        (given,), label=labels, loss_fn=loss_of, return_outputs=True, run_config=split_in(2)
    )
    torch.testing.assert_close(found, loss.detach())
    assert type(outputs) is type(output)
    for name in ("main", "side"):
        torch.testing.assert_close(read(outputs, name), read(output, name).detach())
    assert read(outputs, "note") == "in"
    wrapped.synchronize()
    gradients = {name: p.grad for name, p in wrapped.named_parameters()}
    torch.testing.assert_close(gradients, expected)
    wrapped.zero_grad()
    again = wrapped(given, roundpipe_run_config=split_in(3))
    loss_of(again, labels).backward()
    wrapped.synchronize()
    torch.testing.assert_close({n: p.grad for n, p in wrapped.named_parameters()}, expected)


class Opaque:
    """A type that nobody made known: it goes to every microbatch as it is."""

    def __init__(self, gain):
        self.gain = gain


class Gained(nn.Linear):
    def forward(self, x, how):
        return super().forward(x) * how.gain


def test_an_unknown_type_goes_whole_to_every_microbatch(wrap, split_in):
    torch.manual_seed(0)
    model = Gained(4, 2)
    x = torch.randn(5, 4)
    expected = model(x, Opaque(3.0)).detach()
    with torch.no_grad():
        found = wrap(model, 1)(x, Opaque(3.0), roundpipe_run_config=split_in(2))
    torch.testing.assert_close(found, expected)
