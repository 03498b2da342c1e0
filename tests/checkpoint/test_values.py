"""State goes through JSON and tensors and comes back with its bits and kinds."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.checkpoint.values import decode, encode
from roundpipe.errors import ConfigError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers()
NESTED = st.recursive(
    PLAIN,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inside, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "state"), allow_nan=False)
    return decode(json.loads(text), tensors)


@given(NESTED)
def test_whatever_is_nested_comes_back_as_it_was(value):
    back = there_and_back(value)
    assert repr(back) == repr(value)  # NaN and -0.0 too


def test_tensors_keep_place_dtype_and_bits():
    value = {"a.b": torch.tensor(1.5), "a": [{"b": torch.arange(3, dtype=torch.int16)}], "n": ()}
    back = there_and_back(value)
    assert back["n"] == ()
    assert torch.equal(back["a.b"], torch.tensor(1.5))
    assert back["a"][0]["b"].dtype == torch.int16
    assert there_and_back({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})["a.b"] == 0


def test_numbers_of_numpy_and_counters_are_known():
    assert there_and_back([np.float64(0.1), np.int64(3), np.float32(math.inf)]) == [
        0.1,
        3,
        math.inf,
    ]
    back = there_and_back({"milestones": Counter({3: 1, 7: 2})})["milestones"]
    assert type(back) is Counter
    assert back == Counter({3: 1, 7: 2})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, lambda: 0]}, "state.a.1: function"),
        ({"z": 1j}, "state.z: complex"),
        ({"t": torch.zeros(2, dtype=torch.complex64)}, "state.t: complex64"),
        ({(1, torch.zeros(1)): 2}, "a tensor as a key, which cannot be saved: state"),
        ({"s": {1, 2}}, "state.s: set"),
    ],
)
def test_what_only_pickle_could_keep_is_refused_by_its_place(value, named):
    with pytest.raises(ConfigError) as caught:
        there_and_back(value)
    assert named in str(caught.value)


def test_what_is_nested_without_end_is_refused():
    value = []
    for _ in range(300):
        value = [value]
    with pytest.raises(ConfigError, match="nested too deep"):
        there_and_back(value)


@pytest.mark.parametrize("kind", ["$code", "$pickle"])
def test_nothing_else_is_made_of_a_file(kind):
    with pytest.raises(KeyError):
        decode({kind: "os.system"}, {})
    with pytest.raises(ValueError, match="values to unpack"):
        decode({"$tuple": [], "$float": "nan"}, {})
