"""A model that cannot be split exactly is refused by name, with the reason and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe.errors import ModelError
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.recording import record
from roundpipe.models.refusals import refuse_unsupported


class Config:
    vocab_size = 32
    pad_token_id = 0


class Output(dict):
    __getattr__ = dict.get


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, scale=None, shared=None):
        hidden = hidden + self.linear(hidden) * (1.0 if scale is None else scale)
        if shared is not None:
            shared["last"] = hidden
        return self.give(hidden)

    def give(self, hidden):
        return hidden


class Decoder(nn.Module):
    """The least that is a causal LM; subclasses break one thing each."""

    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(8, 32)

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, input_ids, attention_mask=None, labels=None, *, use_cache, return_dict):
        logits = self.head(self.run_blocks(self.embed(input_ids), input_ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(logits=logits, loss=loss)


class ReadsABlock(Decoder):
    def run_blocks(self, hidden, ids):
        return super().run_blocks(hidden, ids) + self.blocks[0].linear.bias


class CallsAPart(Decoder):
    def run_blocks(self, hidden, ids):
        return self.blocks[0].linear(super().run_blocks(hidden, ids))


class AnotherOrder(Decoder):
    def run_blocks(self, hidden, ids):
        self.config.turn = 1 + getattr(self.config, "turn", 0)
        for index in range(3):
            hidden = self.blocks[(index + self.config.turn) % 3](hidden)
        return hidden


class CountsBetween(Decoder):
    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden, scale=hidden.detach() * 2)
        return hidden


class ForgetsBetween(Decoder):
    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden, scale=hidden.sum().item())
        return hidden


class Shares(Decoder):
    def __init__(self, block=Block):
        super().__init__(block)

    def run_blocks(self, hidden, ids):
        shared = {"first": hidden.new_zeros(())}
        for block in self.blocks:
            hidden = block(hidden, shared=shared)
        return hidden


class TakesOutBlock(Block):
    def forward(self, hidden, shared):
        shared.pop("last", None) if "last" in shared else shared.update(last=hidden)
        return super().forward(hidden)


class TakesOut(Shares):
    def __init__(self):
        super().__init__(TakesOutBlock)


class PutsAThingBlock(Block):
    def forward(self, hidden, shared):
        shared["last"] = object()
        return super().forward(hidden)


class PutsAThing(Shares):
    def __init__(self):
        super().__init__(PutsAThingBlock)


class WritesItsInput(Block):
    def forward(self, hidden):
        return hidden.add_(1.0)


class Mapping(Block):
    def give(self, hidden):
        return {"hidden": hidden}


class TakesMapping(Decoder):
    def __init__(self):
        super().__init__(Mapping)

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden)["hidden"]
        return hidden


class Pair(Block):
    def give(self, hidden):
        return hidden, hidden.mean()


class UsesSecondOutput(Decoder):
    def __init__(self):
        super().__init__(Pair)

    def run_blocks(self, hidden, ids):
        total = 0.0
        for block in self.blocks:
            hidden, extra = block(hidden)
            total = total + extra
        return hidden + total


class IgnoresSecondOutput(Decoder):
    def __init__(self):
        super().__init__(Pair)

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden)[0]
        return hidden


class NeedsMore(Decoder):
    def run_blocks(self, hidden, ids):
        raise ValueError("pixel_values are needed")


REASONS = {
    ReadsABlock: "a tensor of a block is read from outside the block: bias",
    CallsAPart: "a part of a block is called from outside the block: Linear",
    AnotherOrder: "its blocks are called in another order each time",
    CountsBetween: r"an argument depends on weights and on what blocks return: scale of blocks\.1",
    ForgetsBetween: r"an argument depends on weights: scale of blocks\.0",
    TakesOut: "a block takes something out of its arguments: last",
    PutsAThing: "a block puts a thing that is no tensor into its arguments: last: object",
    TakesMapping: "a block returns neither a tensor nor a tuple that begins with one: dict",
    UsesSecondOutput: "its forward failed on a small input: TypeError",
    NeedsMore: "its forward failed on a small input: ValueError: pixel_values are needed",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_cannot_be_split_is_refused_by_name_with_the_reason_and_the_way_out(kind):
    with pytest.raises(ModelError, match=REASONS[kind]) as caught:
        causal_lm_spec(kind())
    assert str(caught.value).startswith(f"{kind.__name__} cannot be split exactly: ")
    assert "\nhint: wrap nn.Sequential(model)" in str(caught.value)


def test_a_block_that_writes_into_its_own_input_is_refused():
    with pytest.raises(ModelError, match="a block writes into a tensor that it is called with"):
        causal_lm_spec(Decoder(WritesItsInput))


def test_the_same_model_with_nothing_broken_is_split():
    assert len(causal_lm_spec(Decoder()).layers) == 5
    assert len(causal_lm_spec(IgnoresSecondOutput()).layers) == 5


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="no repeated blocks: Linear holds no ModuleList"):
        causal_lm_spec(nn.Linear(2, 2))


def test_what_a_shell_refuses_is_refused_here_too():
    model = Decoder()
    model.embed.sparse = True
    with pytest.raises(ModelError, match="sparse gradients"):
        refuse_unsupported(model)
    with pytest.raises(ModelError, match="sparse gradients"):
        causal_lm_spec(model)


def test_the_recording_knows_who_reads_what():
    split = record(Decoder()).split
    assert {home.name for home in split.read_before} == {"embed.weight"}
    assert {home.name for home in split.read_after} == {"head.weight", "head.bias"}
