"""What travels beside the hidden state gives the plain model's loss and gradients, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe.models import recording
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.packet import Packet


class Config:
    vocab_size = 96
    pad_token_id = 0


class Output(dict):
    __getattr__ = dict.get


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, more=None):
        return hidden + self.linear(hidden if more is None else hidden * more)


class Decoder(nn.Module):
    """The least that is a causal LM; subclasses pass on one thing each."""

    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.embed = nn.Embedding(96, 8)
        self.more = nn.Embedding(96, 8)
        self.blocks = nn.ModuleList([block(index) for index in range(4)])
        self.head = nn.Linear(8, 96)

    def forward(self, input_ids, attention_mask=None, labels=None, *, use_cache, return_dict=True):
        hidden = self.run_blocks(self.embed(input_ids), input_ids)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(logits=logits, loss=loss)


class OneForAll(Decoder):
    def run_blocks(self, hidden, ids):
        more = self.more(ids)
        for block in self.blocks:
            hidden = block(hidden, more)
        return hidden


class OneEach(Decoder):
    """Of the first three; and computed where the model gets to the block."""

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            more = self.more(ids) * (block.index + 1)
            hidden = block(hidden, more if block.index < 3 else None)
        return hidden


class TheFirstHiddenState(Decoder):
    def run_blocks(self, hidden, ids):
        first = hidden
        for block in self.blocks:
            hidden = block(hidden, first)
        return hidden


class WithoutGradient(Decoder):
    def run_blocks(self, hidden, ids):
        more = self.more(ids).detach()
        for block in self.blocks:
            hidden = block(hidden, more)
        return hidden


class Sharing(Block):
    """Blocks 0 and 1 put something in, block 2 reads what block 0 did."""

    def forward(self, hidden, shared):
        if self.index < 2:
            shared["kept", self.index] = (self.linear(hidden), hidden * 2, self.index)
        more = shared["kept", 0][0] * shared["kept", 0][1] if self.index == 2 else None
        return super().forward(hidden, more)


class Shares(Decoder):
    def __init__(self):
        super().__init__(Sharing)

    def run_blocks(self, hidden, ids):
        shared = {"before": hidden.new_zeros(1)}
        for block in self.blocks:
            hidden = block(hidden, shared=shared)
        return hidden


class Bag:
    def __init__(self):
        self.kept = []
        self.number = None


class Appending(Block):
    def forward(self, hidden, bag):
        more = sum(bag.kept) / bag.number if bag.kept else None
        bag.kept.append(hidden.tanh())
        bag.number = self.index + 1
        return super().forward(hidden, more)


class FillsABag(Decoder):
    def __init__(self):
        super().__init__(Appending)

    def run_blocks(self, hidden, ids):
        bag = Bag()
        for block in self.blocks:
            hidden = block(hidden, bag)
        return hidden


class Returning(Block):
    def forward(self, hidden, before=None):
        return super().forward(hidden, before), self.linear(hidden).sigmoid(), ids_of(hidden)


def ids_of(hidden):
    return hidden.argmax(-1)


class PassesOn(Decoder):
    def __init__(self):
        super().__init__(Returning)

    def run_blocks(self, hidden, ids):
        before = None
        for block in self.blocks:
            hidden, before, _ = block(hidden, before)
        return hidden


class Listing(Block):
    def forward(self, hidden, more=None):
        return [super().forward(hidden, more), None]


class Lists(Decoder):
    def __init__(self):
        super().__init__(Listing)

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden)[0]
        return hidden


class Reversed(Decoder):
    def run_blocks(self, hidden, ids):
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


class LeavesOneOut(Decoder):
    def run_blocks(self, hidden, ids):
        for block in self.blocks[:3]:
            hidden = block(hidden)
        return hidden


class Repeats(Decoder):
    def run_blocks(self, hidden, ids):
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        return hidden


class ScalesBetween(Decoder):
    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden) * (2 + block.index)
        return hidden


class MixesBetween(Decoder):
    """With weights of its own, the first hidden state, and what an earlier block returned."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def run_blocks(self, hidden, ids):
        first, kept = hidden, None
        for block in self.blocks:
            if block.index == 3:
                hidden = self.mix(hidden) + kept.tanh() * first
            hidden = block(hidden)
            kept = hidden if block.index == 0 else kept
        return hidden + kept.sin() + first


class TakesFromBetween(Decoder):
    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden, hidden.cos())
        return hidden


class Cuts(Decoder):
    """As with a slice of all: nothing is changed, yet it is another tensor."""

    def run_blocks(self, hidden, ids):
        for block in self.blocks:
            hidden = block(hidden[:, 0:])
        return hidden


KINDS = [
    OneForAll,
    OneEach,
    TheFirstHiddenState,
    WithoutGradient,
    Shares,
    FillsABag,
    PassesOn,
    Lists,
    Reversed,
    LeavesOneOut,
    Repeats,
    ScalesBetween,
    MixesBetween,
    TakesFromBetween,
    Cuts,
]
# Two uses of one parameter add up in another order: each layer gives its gradient by itself.
SUMMED = {Repeats, TheFirstHiddenState, MixesBetween, TakesFromBetween}


def loss_of(output):
    return output.loss


def same(ours, plain, *, summed):
    if summed:
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(ours, plain)


def check(model, tiny, chain_of, plain, *, summed=False, tied=()):
    spec = causal_lm_spec(model)
    microbatches = tiny.inputs((9, 6))
    losses, grads = plain(model, microbatches, loss_of)
    chain = chain_of(spec)
    ours = [chain.forward_backward(inputs, loss_of) for inputs in microbatches]
    assert all(map(torch.equal, losses, ours))
    assert chain.grads.keys() == grads.keys()
    for name, gradient in grads.items():
        same(chain.grads[name], gradient, summed=summed or name in tied)
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_plain_model(kind, tiny, chain_of, plain):
    check(kind(), tiny, chain_of, plain, summed=kind in SUMMED)


@pytest.mark.parametrize("kind", [OneForAll, Shares, FillsABag, PassesOn])
def test_so_they_do_where_not_all_blocks_run_at_wrapping(kind, tiny, chain_of, plain, monkeypatch):
    monkeypatch.setattr(recording, "_blocks_to_run", lambda blocks: frozenset({0, 1, 2}))
    spec = causal_lm_spec(kind())
    assert len(spec.layers) == 6
    if kind is not FillsABag:  # each of its blocks is another
        check(kind(), tiny, chain_of, plain)


def boundaries(model, tiny, chain_of):
    chain = chain_of(causal_lm_spec(model))
    inputs = tiny.inputs((5,))[0]
    boundary, found = None, []
    with torch.no_grad():
        context = chain.context(inputs, range(len(chain.shells)))
        for shell in chain.shells[:-1]:
            boundary = shell(boundary, inputs, context)
            found.append(boundary)
    return found


def carried(boundary):
    return sorted(boundary.carried) if isinstance(boundary, Packet) else []


def test_each_thing_travels_until_its_last_reader(tiny, chain_of):
    each = boundaries(OneEach(), tiny, chain_of)
    assert [len(carried(boundary)) for boundary in each] == [3, 2, 1, 0, 0]
    assert isinstance(each[-1], torch.Tensor)
    (one,) = set(map(tuple, map(carried, boundaries(OneForAll(), tiny, chain_of)[:-1])))
    assert len(one) == 1
    passed = boundaries(PassesOn(), tiny, chain_of)
    assert [len(carried(boundary)) for boundary in passed] == [0, 1, 1, 1, 0]
    shared = boundaries(Shares(), tiny, chain_of)
    kept = [len(b.written[0]) if isinstance(b, Packet) else 0 for b in shared]
    assert kept == [0, 1, 2, 2, 0], "all blocks are of a kind: any of them may read"


def test_what_is_computed_between_blocks_is_a_layer_of_its_own(tiny):
    layers = causal_lm_spec(MixesBetween()).layers
    assert [layer.name for layer in layers] == [
        "prefix",
        *("blocks.0", "blocks.1", "blocks.2", "before blocks.3", "blocks.3"),
        "suffix",
    ]
    own = {"mix.weight", "mix.bias", "embed.weight"}
    assert set(layers[4].tensors) == own
    assert set(layers[-1].tensors) == {"head.weight", "head.bias", "embed.weight"}


def test_most_models_pass_on_a_tensor_alone(tiny, chain_of):
    each = boundaries(tiny.make("llama"), tiny, chain_of)
    assert all(isinstance(boundary, torch.Tensor) for boundary in each)


def test_an_object_is_a_new_one_for_each_block(tiny, chain_of, monkeypatch):
    """Blocks run on different devices: what one leaves in an object must not reach another so."""
    seen = []
    forward = Sharing.forward

    def noting(self, hidden, shared):
        seen.append((id(shared), shared))
        return forward(self, hidden, shared)

    monkeypatch.setattr(Sharing, "forward", noting)
    chain = chain_of(causal_lm_spec(Shares()))
    seen.clear()
    context = chain.context(tiny.inputs((5,))[0], range(6))
    for _ in range(2):  # from the same context, as recompute by layer does
        boundary = None
        for shell in chain.shells[:4]:
            boundary = shell(boundary, tiny.inputs((5,))[0], context)
    assert len({key for key, _ in seen}) == 6
    assert [len(shared) for _, shared in seen] == [2, 3, 3, 2, 3, 3]


REAL = {
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 8,
        "sliding_window": 4,
        "activation_sparsity_pattern": [0.0] * 5,
    },
    "gemma4_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "sliding_window": 4,
    },
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 8},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REAL)
def test_shared_keys_inputs_of_each_layer_and_router_states(kind, tiny, chain_of, plain):
    model = tiny.make(kind, **REAL[kind])
    embedding = model.get_input_embeddings().weight
    tied = [name for name, p in model.named_parameters() if p is embedding]
    spec = check(model, tiny, chain_of, plain, tied=tied)
    assert not spec.split.flow.is_bare
