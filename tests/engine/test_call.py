"""Losses of microbatches are shares of the step's loss, whatever they are means over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from roundpipe.engine.call import (
    Asked,
    LossRule,
    StepInMaking,
    ask_forward,
    ask_training,
    put_whole_loss,
    total_loss,
)
from roundpipe.engine.microbatch import Cut
from roundpipe.errors import ConfigError

LABELS = torch.tensor([[1, 2, 3], [1, -100, -100], [1, 2, -100]])  # 2, 0 and 1 trained tokens
IDS = torch.zeros(3, 3)


def value_of(outputs, _):
    return outputs


def shares(asked, outputs):
    return [
        asked.loss(output, part.label, i).item()
        for i, (output, part) in enumerate(zip(outputs, asked.microbatches, strict=True))
    ]


ONES = [torch.tensor(1.0)] * 3


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (LossRule(cut=Cut(3)), [1, 1, 1]),
        (LossRule(), [1 / 3] * 3),
        (LossRule(cut=Cut(3), reduction="mean"), [1 / 3] * 3),
        (LossRule(reduction="sum"), [1, 1, 1]),
        (LossRule(cut=Cut(3), reduction="token_mean"), [2 / 3, 0, 1 / 3]),
        (LossRule(reduction="token_mean", divisor=6), [2 / 6, 0, 1 / 6]),
    ],
)
def test_a_loss_function_is_summed_where_the_split_is_given_else_averaged(rule, expected):
    asked = ask_training((IDS,), {}, LABELS, value_of, rule)
    assert shares(asked, ONES) == pytest.approx(expected)


def test_uneven_microbatches_weigh_by_their_samples():
    asked = ask_training(
        (torch.zeros(5),), {}, None, value_of, LossRule(cut=Cut(2), reduction="mean")
    )
    assert shares(asked, ONES[:2]) == pytest.approx([3 / 5, 2 / 5])


def test_a_mean_over_no_tokens_is_nothing_and_not_nan():
    asked = ask_training((IDS,), {}, LABELS, value_of, LossRule(reduction="token_mean"))
    loss = asked.loss(torch.tensor(torch.nan, requires_grad=True), None, 1)
    loss.backward()
    assert loss == 0


def own(loss=1.0):
    return SimpleNamespace(loss=torch.tensor(loss), logits=None)


LM = LossRule(cut=Cut(3), computes_loss=True, takes_num_items=True)


def test_a_model_that_takes_the_number_of_items_divides_by_it():
    asked = ask_training((), {"input_ids": IDS, "labels": LABELS}, None, None, LM)
    items = [part.inputs.kwargs["num_items_in_batch"] for part in asked.microbatches]
    assert items == [3, 3, 3]
    assert shares(asked, [own()] * 3) == [1, 1, 1]
    assert (asked.tokens, asked.divisor) == (3, 3)


def test_a_model_that_does_not_take_it_gets_shares_by_tokens():
    rule = LossRule(cut=Cut(3), computes_loss=True)
    asked = ask_training((), {"input_ids": IDS, "labels": LABELS}, None, None, rule)
    assert "num_items_in_batch" not in asked.microbatches[0].inputs.kwargs
    assert shares(asked, [own(), own(torch.nan), own()]) == pytest.approx([2 / 3, 0, 1 / 3])


def test_labels_that_the_caller_has_shifted_are_the_ones_that_count():
    shifted = torch.tensor([[2, 3, 4], [-100, -100, -100], [2, -100, -100]])
    given = {"labels": LABELS, "shift_labels": shifted}
    asked = ask_training((), given, None, None, LM)
    assert (asked.tokens, asked.divisor) == (4, 4)
    assert {part.inputs.kwargs["num_items_in_batch"] for part in asked.microbatches} == {4}


def test_another_number_may_mark_what_is_not_trained():
    asked = ask_training((), {"labels": LABELS, "ignore_index": 2}, None, None, LM)
    assert asked.tokens == 4  # of the six past the first


def test_the_number_of_items_of_the_caller_is_the_callers():
    kwargs = {"input_ids": IDS, "labels": LABELS, "num_items_in_batch": torch.tensor(50)}
    asked = ask_training((), kwargs, None, None, LM)
    assert asked.microbatches[0].inputs.kwargs["num_items_in_batch"] == 50
    assert asked.tokens is None


def test_the_models_loss_may_be_averaged_by_samples():
    rule = LossRule(reduction="mean", computes_loss=True, takes_num_items=True)
    asked = ask_training((), {"input_ids": IDS, "labels": LABELS}, None, None, rule)
    assert shares(asked, [own()] * 3) == pytest.approx([1 / 3] * 3)


def test_no_loss_is_refused_with_the_way_out():
    refused = pytest.raises(ConfigError, match=r"no loss to train on(.|\n)*hint: loss_fn=")
    with refused:
        ask_training((IDS,), {}, None, None, LossRule(computes_loss=True))
    asked = ask_training((IDS,), {}, None, None, LossRule())
    for output in (IDS, {"loss": torch.tensor(1.0)}, ()):
        with refused:
            asked.loss(output, None, 0)


def test_a_step_without_trained_tokens_is_refused():
    labels = torch.full_like(LABELS, -100)
    for loss_fn, rule in ((None, LM), (value_of, LossRule(reduction="token_mean"))):
        with pytest.raises(ConfigError, match="nothing to train on"):
            ask_training((), {"input_ids": IDS, "labels": labels}, labels, loss_fn, rule)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ConfigError, match="unknown loss reduction: median"):
        ask_training((IDS,), {}, None, value_of, LossRule(reduction="median"))


@pytest.mark.parametrize("loss", [torch.zeros(2), 3.0, None])
def test_a_loss_that_is_not_one_number_is_refused(loss):
    asked = ask_training((IDS,), {}, None, lambda *_: loss, LossRule())
    with pytest.raises(ConfigError, match="a loss must be one number"):
        asked.loss(None, None, 0)


def test_a_loss_of_one_element_becomes_a_scalar():
    asked = ask_training((IDS,), {}, None, lambda *_: torch.ones(1, 1), LossRule(cut=Cut(3)))
    assert asked.loss(None, None, 0).shape == ()


def test_a_pass_without_labels_asks_for_no_loss():
    assert ask_forward((IDS,), {}, LossRule(cut=Cut(2))).loss is None


def test_the_whole_loss_is_put_into_the_first_output():
    outputs = [own(1.0), own(2.0), own(4.0)]
    put_whole_loss(outputs, lambda output, label, microbatch: output.loss)
    assert outputs[0].loss == 7


def test_losses_are_added_in_order():
    values = [torch.tensor(v) for v in (1e8, 1.0, -1e8)]
    assert total_loss(values) == values[0] + values[1] + values[2]


def asked_for(tokens, divisor):
    labels = torch.full((1, tokens + 1), 5)
    rule = LossRule(cut=Cut(1), computes_loss=True, takes_num_items=True, divisor=divisor)
    return ask_training((), {"input_ids": labels, "labels": labels}, None, None, rule)


def test_calls_of_one_step_are_scaled_to_the_mean_over_all_their_tokens():
    making, weight = StepInMaking(), {}
    for call, tokens in enumerate((4, 1, 7)):
        asked = asked_for(tokens, making.divisor)
        making.check(asked)
        making.runs.append(object())
        making.count(asked)
        weight[call] = tokens / asked.divisor  # of a mean over this call's own tokens
        assert asked.reported(torch.tensor(tokens / asked.divisor)).item() == pytest.approx(1)
    found = [w * making.token_scale for w in weight.values()]
    assert found == pytest.approx([4 / 12, 1 / 12, 7 / 12])
    making.end()
    assert making.divisor is None
    assert making.token_scale == 1.0


def test_a_step_that_was_given_up_leaves_no_divisor():
    making = StepInMaking()
    making.count(asked_for(4, None))
    assert making.divisor is None  # no run of this step is there


def test_several_token_means_and_another_loss_in_one_step_are_refused():
    sums = ask_training((IDS,), {}, None, value_of, LossRule(cut=Cut(3)))
    making = StepInMaking()
    for asked in (asked_for(4, None), sums):
        making.check(asked)
        making.count(asked)
    with pytest.raises(ConfigError, match="means over tokens and some are not"):
        making.check(asked_for(2, 4))
    making.end()
    for asked in (asked_for(4, None), asked_for(2, 4)):
        making.check(asked)
        making.count(asked)
    with pytest.raises(ConfigError, match="means over tokens and some are not"):
        making.check(sums)


def test_a_model_that_returns_its_loss_needs_no_function():
    asked = ask_training((torch.zeros(4, 2),), {}, None, None, LossRule(cut=Cut(2)))
    assert asked.loss is not None
    assert asked.loss(torch.tensor([3.0]), None, 0) == 3.0
    assert asked.loss((torch.tensor(1.0), torch.tensor(2.0)), None, 1).tolist() == [1.0, 2.0]
    assert not asked.is_own


def test_a_sequence_of_losses_is_a_vector_and_adds_up_each():
    asked = ask_training(
        (torch.zeros(6, 1),), {}, None, lambda *_: [torch.ones(1), torch.tensor(3.0)], LossRule()
    )
    assert asked.loss is not None
    parts = [asked.loss(None, None, at) for at in range(6)]
    assert torch.allclose(total_loss(parts), torch.tensor([1.0, 3.0]))
    with pytest.raises(ConfigError, match="another number of losses"):
        total_loss([torch.ones(2), torch.ones(3)])


def test_with_a_routers_loss_the_whole_loss_is_a_mean_weighted_by_tokens():
    inputs = {"input_ids": IDS, "labels": LABELS, "output_router_logits": True}
    asked = ask_training((), inputs, None, None, LM)
    assert all("num_items_in_batch" not in part.inputs.kwargs for part in asked.microbatches)
    assert asked.tokens == asked.divisor


def test_settled_calls_are_one_mean_over_their_tokens():
    making = StepInMaking()
    making.runs.append(None)
    for tokens in (4, 12):
        making.count(Asked([], None, tokens=tokens, divisor=4))
    assert making.token_scale == making.settle() == 0.25
    assert making.divisor == 16
    assert making.settle() == 1.0
