"""Matrices of blocks may be packed; what steers, adds or scales may not."""

from __future__ import annotations

import torch
from tests.models.loading_cases import config
from torch import nn

from roundpipe.models.packable import packable


class Conv1D(nn.Module):
    """Named as transformers' own, which keeps its matrix the other way round."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 96))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 96))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(64, 96))
        self.scale = nn.Parameter(torch.empty(96, 64))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.gate = nn.Linear(64, 128, bias=False)
        self.router = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(8192)
        self.conv = nn.Conv1d(64, 64, 4)
        self.table = nn.Embedding(128, 64)
        self.small = nn.Linear(8, 8)
        self.experts = Experts()
        self.old = Conv1D()
        self.tied = self.up
        self.codes = nn.Linear(64, 96, bias=False)
        codes = torch.zeros(96, 64, dtype=torch.uint8)
        self.codes.weight = nn.Parameter(codes, requires_grad=False)


def test_matrices_and_stacks_are_packed_each_once_and_nothing_else():
    block = Block()
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    assert [names[id(parameter)] for parameter in packable(block)] == [
        "up.weight",
        "experts.gate_up_proj",
        "old.weight",
    ]


def test_all_but_a_few_percent_of_a_block_of_experts_is_packed():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("qwen3_moe"))
    block = model.model.layers[0]
    count = sum(parameter.numel() for parameter in packable(block))
    assert count > 0.85 * sum(parameter.numel() for parameter in block.parameters())
    assert not any(parameter is block.mlp.gate.weight for parameter in packable(block))
