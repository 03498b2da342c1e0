"""What forward chose is chosen again, whatever the values are by then, and gradients follow it."""

from __future__ import annotations

import pytest
import torch

from roundpipe.engine.choices import Noting, Replaying
from roundpipe.engine.random import DrawsFrom
from roundpipe.errors import ModelError

CPU = torch.device("cpu")
MIXED = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
OTHER = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))

ALONG = {
    "topk": lambda x: x.topk(3),
    "topk along rows": lambda x: torch.topk(x, 2, dim=0),
    "topk of the smallest": lambda x: torch.topk(x, 2, dim=-1, largest=False, sorted=False),
    "sort": lambda x: x.sort(dim=1, descending=True),
    "stable sort": lambda x: torch.sort(x, dim=0, stable=True),
    "max": lambda x: x.max(dim=1),
    "max, kept dimension": lambda x: x.max(1, keepdim=True),
    "min": lambda x: torch.min(x, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 2),
    "median": lambda x: x.median(1),
    "mode": lambda x: x.mode(0),
    "cummax": lambda x: x.cummax(1),
}
INTEGERS = {
    "argmax": lambda x: x.argmax(),
    "argmax along rows": lambda x: x.argmax(0, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "argsort": lambda x: x.argsort(1, descending=True),
    "searchsorted": lambda x: torch.searchsorted(x.flatten().sort()[0], torch.tensor([0.1, 0.2])),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])),
    "bucketize to int32": lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0]), out_int32=True),
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
}
NUMBERS = {
    "item": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x[0, 0] > 0),
    "any": lambda x: bool((x > 2.0).any()),
}


def twice(choose, first, second):
    """What is chosen of ``first``, and of ``second`` in its recompute."""
    noting = Noting()
    with DrawsFrom(1, CPU, noting):
        chosen = choose(first)
    replaying = Replaying(noting.notes)
    with DrawsFrom(1, CPU, replaying):
        again = choose(second)
    replaying.end()
    return chosen, again, noting.notes


@pytest.mark.parametrize("name", ALONG)
def test_values_and_gradients_are_those_at_the_places_chosen_in_forward(name):
    choose = ALONG[name]
    given = OTHER.clone().requires_grad_()
    chosen, again, notes = twice(choose, MIXED, given)
    assert torch.equal(again.indices, chosen.indices)
    assert again.indices.dtype == torch.int64
    assert notes[0][1].dtype == torch.uint8
    assert not torch.equal(choose(OTHER).indices, chosen.indices)  # it would have chosen otherwise

    weight = torch.rand(chosen.values.shape, generator=torch.Generator().manual_seed(1))
    (again.values * weight).sum().backward()

    plain = OTHER.clone().requires_grad_()
    values = _at(plain, chosen.indices, name)
    assert torch.equal(again.values, values)
    (values * weight).sum().backward()
    assert torch.equal(given.grad, plain.grad)


def _at(x, indices, name):
    if indices.dim() == 2:
        dim = 0 if name in ("topk along rows", "stable sort") else 1
        return x.gather(dim, indices)
    dim = 0 if name in ("min", "mode") else 1
    return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_those_of_forward(name):
    chosen, again, _ = twice(INTEGERS[name], MIXED, OTHER)
    assert torch.equal(again, chosen)
    assert again.dtype == chosen.dtype
    assert not torch.equal(INTEGERS[name](OTHER), chosen)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_python_reads_are_those_of_forward(name):
    first, second = MIXED.abs() + 3, -MIXED.abs()
    chosen, again, notes = twice(NUMBERS[name], first, second)
    assert again == chosen != NUMBERS[name](second)
    assert not isinstance(notes[-1][1], torch.Tensor)


def test_choices_among_integers_are_made_again():
    _, again, notes = twice(lambda x: x.sort(), torch.tensor([2, 1]), torch.tensor([5, 7]))
    assert again.values.tolist() == [5, 7]
    assert notes == []


@pytest.mark.parametrize(
    ("length", "dtype"), [(255, torch.uint8), (256, torch.int16), (40_000, torch.int32)]
)
def test_indices_are_kept_in_the_smallest_type(length, dtype):
    x = torch.arange(float(length))
    chosen, again, notes = twice(lambda x: x.topk(1), x, -x)
    assert notes[0][1].dtype == dtype
    assert torch.equal(again.indices, chosen.indices)


def test_draws_behind_a_replayed_draw_go_on_where_forward_went_on():
    def draw(x):
        return torch.multinomial(x.exp(), 2), torch.rand(3)

    (_, noise), (_, again), _ = twice(draw, MIXED, OTHER)
    assert torch.equal(noise, again)


def test_another_way_through_a_layer_is_an_error():
    noting = Noting()
    with DrawsFrom(1, CPU, noting):
        MIXED.topk(2)
    apart = r"it came to aten\.sort\.default, forward came to aten\.topk\.default"
    with DrawsFrom(1, CPU, Replaying(noting.notes)), pytest.raises(ModelError, match=apart):
        MIXED.sort()
    replaying = Replaying(noting.notes)
    with pytest.raises(ModelError, match=r"it came to the end, forward came to aten\.topk"):
        replaying.end()
