"""Tensors within arguments are found, exchanged and compared, and nothing given is changed."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from roundpipe.errors import ModelError
from roundpipe.models import paths

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.ones(2), torch.zeros(3)


@dataclass(frozen=True)
class Held:
    value: object


def tree():
    return (ONE, {"a": [TWO, Pair(1, ONE)], "b": UserDict(k=TWO), "c": Held((TWO,))})


def test_every_tensor_is_found_with_a_path_that_leads_to_it():
    found = dict(paths.tensors(tree()))
    assert [paths.named(path) for path in found] == [
        *("0", "1.a.0", "1.a.1.1", "1.b.data.k", "1.c.value.0")
    ]
    assert all(paths.get(tree(), path) is tensor for path, tensor in found.items())


def test_what_contains_itself_is_entered_once():
    loop = [ONE]
    loop.append(loop)
    assert len(list(paths.tensors(loop))) == 1


def test_replacing_makes_new_containers_along_the_way_only():
    given = tree()
    new = torch.full((1,), 5.0)
    every = dict.fromkeys((path for path, _ in paths.tensors(given)), new)
    made = paths.replaced(given, every)
    assert all(tensor is new for _, tensor in paths.tensors(made))
    assert isinstance(made[1]["a"][1], Pair)
    assert [tensor for _, tensor in paths.tensors(given)] == [*(ONE, TWO, ONE, TWO, TWO)]
    one = paths.replaced(given, {(("item", 0),): new})
    assert one[1] is given[1]


def test_a_new_key_and_the_next_item_of_a_list_are_added():
    made = paths.replaced({"a": [1]}, {(("item", "b"),): 2, (("item", "a"), ("item", 1)): 3})
    assert made == {"a": [1, 3], "b": 2}


def test_changes_are_what_was_put_in():
    given = {"a": [TWO], "b": UserDict(), "n": 1, "t": (ONE, 2)}
    before = paths.copied(given)
    assert paths.changes(before, given) == {}
    given["a"].append(ONE)
    given["b"]["k"] = (ONE, TWO)
    given["n"] = 2
    given["t"] = (TWO, 2)
    found = paths.changes(before, given)
    assert [paths.named(path) for path in found] == ["a.1", "b.data.k", "n", "t"]
    again = paths.replaced(before, found)
    assert again["a"][1] is ONE
    assert again["b"]["k"][1] is TWO
    assert again["n"] == 2
    assert len(before["a"]) == 1, "what was given stays"


def test_what_cannot_be_carried_is_refused_by_name():
    given = {"a": {"x": 1}}
    before = paths.copied(given)
    given["a"]["y"] = object()
    with pytest.raises(ModelError, match=r"a thing that is no tensor.*: a\.y: object"):
        paths.changes(before, given)
    del given["a"]["y"], given["a"]["x"]
    with pytest.raises(ModelError, match=r"takes something out of its arguments: a\.x"):
        paths.changes(before, given)


def test_differences_are_by_value():
    left, right = tree(), paths.copied(tree())
    assert not list(paths.differences(left, right))
    other = paths.replaced(right, {(("item", 1), ("item", "b"), ("attribute", "data")): {"k": ONE}})
    assert [paths.named(path) for path, _ in paths.differences(left, other)] == ["1.b.data.k"]
    assert [paths.named(path) for path, _ in paths.differences([1, "a"], [1, "b"])] == ["1"]


def test_modules_configs_and_plain_values_are_no_containers():
    class SomeConfig:
        pass

    for value in (torch.nn.Linear(1, 1), SomeConfig(), 3, "a", None, torch.float32, len, int):
        assert paths.entries(value) is None
        assert paths.copied(value) is value
        assert not paths.is_mutable(value)
    assert paths.is_mutable(([],))
    assert not paths.is_mutable((1, (ONE,)))
