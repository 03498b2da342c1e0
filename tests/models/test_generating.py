"""The tree that generates: whose weights it holds, what it refuses to run, what stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.choose import spec_for
from roundpipe.models.generating import GeneratingTree

CPU = torch.device("cpu")


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            vocab_size=32,
            pad_token_id=0,
        )
    )
    model.model.tower = nn.Sequential(nn.Linear(4, 4), nn.Dropout())  # no text reaches it
    return model.train()


def bound(model):
    """A tree over clones of the model's tensors."""
    tree = GeneratingTree(spec_for(model), CPU)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in named.items()}
    for part in (tree.outside, *tree.blocks.values()):
        part.bind(values)
    return tree, values


def test_it_runs_as_the_model_does_in_evaluation(model):
    tree, _ = bound(model)
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        ours = tree.module(ids).logits
        assert model.training
        assert torch.equal(ours, model.eval()(ids).logits)
    assert list(tree.blocks) == [1, 2, 3]


def test_it_shares_no_tensor_with_the_model(model):
    tree, values = bound(model)
    own = {t.data_ptr() for t in values.values()}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    theirs = {t.data_ptr() for t in named.values()}
    held = {
        name: tensor.data_ptr()
        for name, tensor in (*tree.module.named_parameters(), *tree.module.named_buffers())
        if "tower" not in name
    }
    assert held.keys() == {name for name in named if "tower" not in name}
    assert set(held.values()) <= own
    assert theirs.isdisjoint(held.values())


def test_what_text_does_not_reach_takes_no_memory_and_refuses_to_run(model):
    tree, _ = bound(model)
    tower = tree.module.model.tower
    assert tower[0].weight.untyped_storage().nbytes() == 4
    assert not any("tower" in name for name in tree.tensors)
    with pytest.raises(ModelError, match=r"generates from text alone[\s\S]*: Linear\nhint: "):
        tower(torch.zeros(1, 4))


def test_released_it_holds_no_memory(model):
    tree, values = bound(model)
    for part in (tree.outside, *tree.blocks.values()):
        part.release()
    mine = {tensor.data_ptr() for tensor in values.values()}
    tensors = [*tree.module.parameters(), *tree.module.buffers()]
    assert mine.isdisjoint(tensor.data_ptr() for tensor in tensors)
    assert all(tensor.untyped_storage().nbytes() <= 8 for tensor in tensors)


def test_a_part_that_only_lacks_a_vector_of_its_own_runs(model):
    model.model.newline = nn.Parameter(torch.ones(4))  # what no text reads, beside what all reads
    tree, _ = bound(model)
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        assert torch.equal(tree.module(ids).logits, model.eval()(ids).logits)
