"""A causal LM's arguments are of one batch: a row for each sample, or one for all."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.engine.microbatch import split
from roundpipe.engine.rows import require_rows
from roundpipe.errors import ConfigError

IDS = torch.arange(20).view(4, 5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attention_mask", (3, 5)),
        ("attention_mask", (5,)),
        ("position_ids", (3, 5)),
        ("labels", (1, 5)),
        ("labels", (3, 5)),
    ],
)
def test_an_argument_of_another_batch_is_refused_by_name(name, shape):
    with pytest.raises(ConfigError, match=rf"{name} must have a row for each of 4(.|\n)*hint"):
        require_rows({"input_ids": IDS, name: torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (1, 1, 5, 5), (4, 1, 5, 5)])
def test_a_mask_has_a_row_for_each_sample_or_one_for_all(shape):
    require_rows({"input_ids": IDS, "attention_mask": torch.ones(shape)})


def _first_three(args, kwargs, number):
    return [args] * number, [{name: value[:3] for name, value in kwargs.items()}] * number


def test_a_mask_with_a_row_too_few_trains_nothing_unless_the_caller_cuts_it():
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=2))
    batch = {"attention_mask": torch.ones(3, 5, dtype=torch.long), "labels": IDS}
    batch["attention_mask"][0, 0] = 0
    with RoundPipe(model, devices=["cpu"]) as wrapped:
        for given in ({"input_kwargs": {"input_ids": IDS, **batch}}, {"input_args": (IDS,)}):
            kwargs = given.setdefault("input_kwargs", batch)
            with pytest.raises(ConfigError, match="attention_mask must have a row for each of 4"):
                wrapped.forward_backward(**given)
            with pytest.raises(ConfigError, match="attention_mask must have a row for each of 4"):
                wrapped(*given.get("input_args", ()), **kwargs)
        own = RoundPipeRunConfig(num_microbatch=1, split_input=_first_three)
        wrapped.forward_backward(input_kwargs={"input_ids": IDS, **batch}, run_config=own)


@pytest.mark.parametrize("size", [3, 4])
def test_positions_in_time_height_and_width_are_cut_along_their_samples(size):
    positions = torch.arange(3 * size * 5).view(3, size, 5)
    ids = torch.zeros(size, 5)
    usual = split((), {"input_ids": ids, "position_ids": positions}, None, 2)
    assert torch.equal(torch.cat([p.inputs.kwargs["position_ids"] for p in usual], 1), positions)
    widths = [p.inputs.kwargs["position_ids"].shape[1] for p in usual]
    assert widths == [p.num_samples for p in usual]
