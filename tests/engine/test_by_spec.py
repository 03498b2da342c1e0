"""Specs cut and join trees as the markers of torch's pipelining say."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _Replicate,
    sum_reducer,
)

from roundpipe.engine.by_spec import cut_by_spec, join_by_spec, marker_of
from roundpipe.errors import ConfigError

Pair = namedtuple("Pair", ["x", "y"])


def whole(tree):
    return [tree, tree]


def first(parts):
    return parts[0]


def test_markers_are_known_as_classes_and_as_values():
    assert marker_of(_Replicate) == marker_of(_Replicate()) == "_Replicate"
    assert marker_of(TensorChunkSpec(1)) == "TensorChunkSpec"
    assert marker_of(_CustomReducer(0, max)) == "_CustomReducer"
    assert marker_of(sum_reducer) == "_CustomReducer"
    assert marker_of((TensorChunkSpec(0),)) is None


def test_a_tree_is_cut_along_the_dimension_of_each_marker():
    tree = (torch.arange(4), {"a": torch.zeros(3, 4), "b": "word"}, torch.ones(2))
    spec = (TensorChunkSpec(0), {"a": TensorChunkSpec(1)}, _Replicate)
    one, two = cut_by_spec(tree, spec, 2, whole)
    assert one[0].tolist() == [0, 1]
    assert two[0].tolist() == [2, 3]
    assert one[1]["a"].shape == two[1]["a"].shape == (3, 2)
    assert one[1]["b"] == "word"
    assert one[2] is tree[2]


def test_parts_without_a_marker_are_left_to_the_automatic_rule():
    assert cut_by_spec((1, 2), (None, _Replicate), 2, lambda t: [t, t + 10]) == [(1, 2), (11, 2)]
    assert cut_by_spec(5, None, 2, whole) == [5, 5]


def test_named_tuples_and_lists_stay_what_they_are():
    pieces = cut_by_spec(Pair(torch.arange(2), 1), (TensorChunkSpec(0), _Replicate), 2, whole)
    assert isinstance(pieces[0], Pair)
    assert isinstance(cut_by_spec([1], [_Replicate], 2, whole)[0], list)
    joined = join_by_spec(pieces, (TensorChunkSpec(0), _Replicate), first)
    assert isinstance(joined, Pair)
    assert joined.x.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("tree", "spec", "match"),
    [
        ((1, 2), (_Replicate,), "does not have the form"),
        ({"a": 1}, {"b": _Replicate}, "does not have the form"),
        (torch.arange(3), "word", "does not have the form"),
        (torch.arange(3), TensorChunkSpec(1), "along dimension 1"),
        (torch.arange(1), TensorChunkSpec(0), "num_microbatch=1"),
        ("word", TensorChunkSpec(0), "a str"),
    ],
)
def test_specs_that_do_not_match_are_refused(tree, spec, match):
    with pytest.raises(ConfigError, match=match):
        cut_by_spec(tree, spec, 2, whole)


def test_outputs_are_joined_kept_or_folded():
    parts = [
        {"x": torch.full((2, 1), float(at)), "n": torch.tensor(float(at)), "s": "s"}
        for at in range(3)
    ]
    total = _CustomReducer(torch.tensor(0.0), lambda a, b: a + b)
    found = join_by_spec(parts, {"x": TensorChunkSpec(1), "n": total}, first)
    assert found["x"].shape == (2, 3)
    assert found["n"] == 3
    assert found["s"] == "s"
    assert join_by_spec([1, 1], _Replicate, first) == 1
    with pytest.raises(ConfigError, match="does not have the form"):
        join_by_spec([1, 1], (_Replicate,), first)
