"""Draws under the mode are those of ``torch.manual_seed`` in plain PyTorch, on any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from roundpipe.engine.random import DrawsFrom, Undrawn, layer_seed, pass_seed

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 40).reshape(4, 10)
DRAWS = {
    "dropout": lambda: nn.functional.dropout(X, 0.4),
    "dropout in place": lambda: nn.functional.dropout(X.clone(), 0.4, inplace=True),
    "alpha dropout": lambda: nn.functional.alpha_dropout(X, 0.4, training=True),
    "dropout of channels": lambda: nn.functional.dropout1d(X[None], 0.4),
    "rrelu": lambda: nn.functional.rrelu(X, training=True),
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        X[None], X[None], X[None], dropout_p=0.4
    ),
    "gumbel": lambda: nn.functional.gumbel_softmax(X),
    "rand": lambda: torch.rand(3, 3),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(5),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(0, 100, (7,)),
    "randint_like": lambda: torch.randint_like(X, 100),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(X.abs()),
    "multinomial": lambda: torch.multinomial(X.abs(), 3),
    "normal": lambda: torch.normal(X, X.abs()),
    "normal_": lambda: torch.empty(6).normal_(),
    "uniform_": lambda: torch.empty(6).uniform_(2, 3),
    "exponential_": lambda: torch.empty(6).exponential_(),
    "poisson": lambda: torch.poisson(X.abs() * 5),
}


@pytest.fixture(autouse=True)
def _random_state_is_kept():
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


def plainly(draw, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw(), draw()


@pytest.mark.parametrize("name", DRAWS)
def test_an_operation_draws_as_after_manual_seed(name):
    draw = DRAWS[name]
    expected = plainly(draw, 7)
    with DrawsFrom(7, CPU) as mode:
        found = draw(), draw()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert mode.generator is not None
    assert not torch.equal(*found)  # the second goes on where the first ended


def test_operations_in_turn_share_one_sequence_of_draws():
    def draw():
        return torch.cat([torch.rand(3), DRAWS["rrelu"]().flatten(), torch.randn(4)])

    expected = plainly(draw, 3)
    with DrawsFrom(3, CPU):
        found = draw(), draw()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_backward_through_dropout_uses_the_mask_of_its_forward():
    x = torch.ones(1000, requires_grad=True)
    with DrawsFrom(5, CPU):
        y = nn.functional.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("draw", [DRAWS["dropout"], DRAWS["rrelu"], DRAWS["multinomial"]])
def test_threads_at_once_do_not_disturb_each_other(draw):
    expected = [plainly(draw, seed)[0] for seed in range(24)]

    def in_thread(seed):
        with DrawsFrom(seed, CPU):
            return draw()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(in_thread, range(24)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_generator_of_the_users_is_used():
    def draw():
        return torch.rand(4, generator=torch.Generator().manual_seed(11))

    expected = draw()
    with DrawsFrom(3, CPU) as mode:
        assert torch.equal(draw(), expected)
    assert mode.generator is None


def test_attention_without_dropout_is_no_draw():
    with DrawsFrom(3, CPU) as mode:
        nn.functional.scaled_dot_product_attention(X[None], X[None], X[None])
        nn.functional.dropout(X, 0.5, training=False)
    assert mode.generator is None


def test_seeds_differ_in_each_number_and_fit_a_generator():
    numbers = [(s, t, i, m) for s in (0, 1, 2**63) for t in (0, 1) for i in (0, 12) for m in (0, 1)]
    seeds = {layer_seed(*each) for each in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert layer_seed(1, 2, 3, 4) == layer_seed(1, 2, 3, 4)
    assert layer_seed(1, 12, 3, 4) != layer_seed(11, 2, 3, 4)
    assert pass_seed(1) != pass_seed(2)


def test_a_draw_from_the_default_generator_is_noticed():
    undrawn = Undrawn(CPU)
    torch.rand(3, generator=torch.Generator())
    nn.functional.dropout(X, 0.5, training=False)
    assert not undrawn.has_drawn()
    with torch.random.fork_rng(devices=[]):
        undrawn = Undrawn(CPU)
        torch.rand(1)
        assert undrawn.has_drawn()


def test_a_draw_beside_a_lent_generator_is_not_missed():
    undrawn = Undrawn(CPU)
    with DrawsFrom(1, CPU):
        torch.native_dropout(X, 0.5, True)  # lends the default generator: what is drawn is lost
    assert undrawn.has_drawn()
