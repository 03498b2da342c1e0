"""A batch is cut along its first dimension, labels by the same rule, and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.call import total_loss
from roundpipe.engine.microbatch import (
    DEFAULT_NUM_MICROBATCH,
    Cut,
    RoundPipePackedData,
    batch_size_of,
    config_of_call,
    joined,
    merge,
    sizes,
    split,
)
from roundpipe.errors import ConfigError, DeviceError


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_are_even_never_zero_and_add_up(batch_size, num_microbatch):
    found = sizes(batch_size, num_microbatch)
    assert sum(found) == batch_size
    assert len(found) == min(batch_size, num_microbatch)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@given(st.integers(1, 30), st.integers(1, 12))
def test_parts_hold_the_batch_in_order_and_labels_with_their_inputs(batch_size, num_microbatch):
    x = torch.arange(batch_size * 3).reshape(batch_size, 3)
    y = torch.arange(batch_size)
    parts = split((x,), {"more": {"deep": [x + 1]}}, {"y": y}, num_microbatch)
    assert torch.equal(torch.cat([part.inputs.args[0] for part in parts]), x)
    for part in parts:
        assert torch.equal(part.inputs.args[0][:, 0] // 3, part.label["y"])
        assert torch.equal(part.inputs.kwargs["more"]["deep"][0], part.inputs.args[0] + 1)
        assert part.num_samples == len(part.label["y"])


def test_what_is_not_along_the_batch_goes_to_every_microbatch_as_it_is():
    x, table, scalar = torch.zeros(4, 2), torch.zeros(1, 2), torch.tensor(3)
    kwargs = {"table": table, "n": 5, "scalar": scalar, "none": None, "word": "w"}
    for part in split((x,), kwargs, None, 2):
        assert part.inputs.kwargs == kwargs
        assert part.inputs.kwargs["table"] is table
        assert part.inputs.args[0].shape == (2, 2)


def test_parts_are_views_of_the_batch():
    x = torch.zeros(4, 2)
    parts = split((x,), {}, None, 2)
    assert parts[1].inputs.args[0].data_ptr() == x[2:].data_ptr()


def test_a_batch_is_cut_into_eight_at_most_unless_told():
    assert len(split((torch.zeros(40),), {}, None, None)) == DEFAULT_NUM_MICROBATCH == 8
    assert len(split((torch.zeros(3),), {}, None, None)) == 3
    assert len(split((torch.zeros(40),), {}, None, 40)) == 40


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((torch.zeros(0, 3),), "the batch is empty"),
        ((torch.tensor(1.0), "x"), "no tensor with a batch dimension"),
        ((), "no tensor with a batch dimension"),
    ],
)
def test_what_cannot_be_cut_is_refused(args, match):
    with pytest.raises(ConfigError, match=match):
        batch_size_of(args, {})


def test_fewer_than_one_microbatch_is_refused():
    with pytest.raises(ConfigError, match="num_microbatch must be at least 1: 0"):
        split((torch.zeros(3),), {}, None, 0)


def test_outputs_are_joined_leaf_by_leaf():
    a, b = torch.zeros(2, 3), torch.ones(1, 3)
    assert torch.equal(merge([a, b]), torch.cat([a, b]))
    found = merge([(a, {"k": a}), (b, {"k": b})])
    assert torch.equal(found[0], torch.cat([a, b]))
    assert torch.equal(found[1]["k"], torch.cat([a, b]))
    assert merge([a]) is a


def test_scalars_are_averaged_and_other_values_must_be_the_same():
    outputs = [CausalLMOutput(loss=torch.tensor(float(i)), logits=torch.ones(2, 1) * i)
               for i in range(3)]  # fmt: skip
    found = merge(outputs)
    assert isinstance(found, CausalLMOutput)
    assert found.loss == 1
    assert found.logits.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert merge([("a", 1), ("a", 1)]) == ("a", 1)
    with pytest.raises(ConfigError, match="different values"):
        merge([("a", 1), ("b", 1)])


def test_shapes_that_do_not_fit_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"\[\(2, 3\), \(2, 4\)\](.|\n)*merge_output=False"):
        merge([torch.zeros(2, 3), torch.zeros(2, 4)])


def test_a_list_and_another_device_may_be_asked_for():
    outputs = [torch.zeros(2, 3), torch.zeros(2, 4)]
    packed = joined(outputs, RoundPipeRunConfig(merge_output=False))
    assert isinstance(packed, RoundPipePackedData)
    packed.synchronize()
    assert all(one.equal(other) for one, other in zip(packed, outputs, strict=True))
    numbers, tensors = joined([(1, x) for x in outputs], RoundPipeRunConfig(merge_output=False))
    assert numbers == [1, 1]
    assert all(one.equal(other) for one, other in zip(tensors, outputs, strict=True))
    moved = joined([outputs[0], outputs[0]], RoundPipeRunConfig(output_device="meta"))
    assert moved.device.type == "meta"
    assert moved.shape == (4, 3)


@dataclass
class Opaque:
    """A class that pytree does not know: one leaf."""

    x: torch.Tensor


@pytest.mark.parametrize("device", ["cuda:63", torch.device("cuda:63"), "nonsense"])
def test_an_output_device_that_is_not_there_is_refused_before_anything_runs(device):
    asked = RoundPipeRunConfig(output_device=device)
    with pytest.raises(DeviceError, match=r"output_device cannot be used: (.|\n)*hint: .*cpu"):
        config_of_call(RoundPipeRunConfig(), asked)


def test_an_opaque_input_goes_whole():
    opaque = Opaque(torch.zeros(4))
    parts = split((torch.zeros(4), opaque), {}, None, 2)
    assert all(part.inputs.args[1] is opaque for part in parts)
    assert pytree.tree_leaves(opaque) == [opaque]


def test_packed_arguments_go_on_to_the_microbatch_of_their_number():
    packed = RoundPipePackedData([torch.zeros(2), torch.ones(3)])
    parts = split((packed,), {"x": torch.arange(4)}, torch.arange(5), None)
    assert [part.inputs.args[0].tolist() for part in parts] == [[0, 0], [1, 1, 1]]
    assert [part.inputs.kwargs["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.label.tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    with pytest.raises(ConfigError, match="different numbers"):
        split((packed, RoundPipePackedData([1])), {}, None, None)


def test_a_function_cuts_inputs_and_another_one_labels():
    def cut(args, kwargs, count):
        return [(args[0][at::count],) for at in range(count)], [kwargs] * count

    def cut_label(label, count):
        return [label * at for at in range(count)]

    parts = split((torch.arange(6),), {"k": 1}, 7, Cut(2, cut, cut_label))
    assert [part.inputs.args[0].tolist() for part in parts] == [[0, 2, 4], [1, 3, 5]]
    assert [part.label for part in parts] == [0, 7]
    assert [part.num_samples for part in parts] == [3, 3]
    assert parts[0].inputs.kwargs == {"k": 1}


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (Cut(2, lambda a, k, n: ([a], [k, k])), "two lists"),
        (Cut(2, lambda a, k, n: ([], [])), "no microbatch"),
        (Cut(2, (None,)), "args spec, kwargs spec"),
        (Cut(2, None, lambda label, count: [label]), "1 labels for 2"),
        (Cut(2, ((None, None), None)), "does not have the form"),
    ],
)
def test_rules_that_do_not_cut_a_call_are_refused(cut, match):
    with pytest.raises(ConfigError, match=match):
        split((torch.arange(4),), {}, 1, cut)


CALLERS = {"merged": None, "packed": False, "own": lambda outputs: outputs[0]}


@pytest.mark.parametrize("how", CALLERS.values(), ids=CALLERS)
def test_what_a_caller_gets_does_not_lie_where_the_next_call_writes(how):
    """A caller may let go of it while a card still copies from it."""
    output = {"logits": torch.ones(2, 3), "loss": torch.tensor(2.0)}
    together = joined([output], RoundPipeRunConfig(merge_output=how))
    for name, value in output.items():
        got = together[name][0] if how is False else together[name]
        assert torch.equal(got, value)
        assert got.data_ptr() != value.data_ptr()
    assert total_loss([output["loss"]]).data_ptr() != output["loss"].data_ptr()
