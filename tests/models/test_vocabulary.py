"""A token that the model has no row for is refused before any device sees it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.models.vocabulary import Vocabulary

IDS = torch.arange(20).view(4, 5)


def _model():
    few = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**few, num_attention_heads=2))


@pytest.mark.parametrize("name", ["input_ids", "labels", "shift_labels"])
@pytest.mark.parametrize("token", [32, -7])
def test_a_token_outside_is_refused_with_its_place(name, token):
    tokens = IDS.clone()
    tokens[2, 3] = token
    with pytest.raises(ConfigError, match=rf"{name}.*: {token} in row 2, column 3\n.*0 to 31"):
        Vocabulary(_model(), 32).check({"input_ids": IDS, name: tokens})


def test_what_marks_untrained_tokens_is_none():
    labels = IDS.clone()
    labels[0, :2] = -100
    Vocabulary(_model(), 32).check({"input_ids": IDS, "labels": labels})
    labels[0, :2] = -7
    Vocabulary(_model(), 32).check({"input_ids": IDS, "labels": labels, "ignore_index": -7})


def test_a_module_without_a_vocabulary_takes_anything():
    for module in (None, torch.nn.Linear(2, 2)):
        Vocabulary(module).check({"input_ids": IDS + 1000, "labels": IDS + 1000})


def test_a_wrapper_refuses_it_in_every_call_and_goes_on():
    outside = IDS.clone()
    outside[1, 1] = 99
    with RoundPipe(_model(), devices=["cpu"]) as wrapped:
        with pytest.raises(ConfigError, match="labels hold a token outside"):
            wrapped.forward_backward(input_kwargs={"input_ids": IDS, "labels": outside})
        with pytest.raises(ConfigError, match="input_ids hold a token outside"):
            wrapped(input_ids=outside)
        with pytest.raises(ConfigError, match="input_ids hold a token outside"):
            wrapped.generate(outside, max_new_tokens=1)
        wrapped.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
