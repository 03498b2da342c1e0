"""The blocks of a model are those that text runs through, whatever else it holds in lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.find_blocks import find_blocks


class Config:
    vocab_size = 32
    pad_token_id = 0


class Tower(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))


class Reader(nn.Module):
    """A decoder beside a larger tower; a small list is called before its blocks."""

    def __init__(self, *, looks_at_data=False):
        super().__init__()
        self.config = Config()
        self.vision = Tower()
        self.embed = nn.Embedding(32, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8)])
        self.text = nn.Module()
        self.text.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.looks_at_data = looks_at_data

    def get_decoder(self):
        return self.text

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None):
        hidden = self.norms[0](self.embed(input_ids))
        if self.looks_at_data:
            hidden.numpy()
        for block in self.text.blocks:
            hidden = block(hidden)
        return hidden


def test_a_larger_list_that_no_text_reaches_is_not_that_of_the_blocks():
    assert find_blocks(Reader())[0] == "text.blocks"


def test_a_model_that_cannot_run_without_data_has_its_blocks_in_what_it_calls_its_decoder():
    assert find_blocks(Reader(looks_at_data=True))[0] == "text.blocks"


def test_the_outer_one_of_two_lists_is_taken_but_no_list_of_lists():
    model = nn.Module()
    model.groups = nn.ModuleList([nn.ModuleList([Tower(4), Tower(4)])])
    assert find_blocks(model)[0] == "groups.0"


def test_the_model_is_as_it_was():
    model = Reader().train()
    state = torch.get_rng_state()
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    find_blocks(model)
    assert torch.equal(state, torch.get_rng_state())
    assert before == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert all(module.training for module in model.modules())


def test_a_model_without_a_list_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match=r"holds no ModuleList\nhint: wrap nn\.Sequential"):
        find_blocks(nn.Linear(2, 2))
