import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from roundpipe.optim.decay import decay_groups


class Block(nn.Module):
    """Names that a rule by name alone gets wrong in both directions."""

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(3)
        self.q_norm = nn.RMSNorm(3)
        self.norm = nn.Linear(3, 3, bias=False)
        self.normal = nn.Linear(3, 3)
        self.sinks = nn.Parameter(torch.ones(3))
        self.Bias_table = nn.Parameter(torch.ones(3, 3))
        self.embed = nn.Embedding(4, 3)


def names_of(groups, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}


def decaying_in_the_trainer(model):
    from transformers import Trainer

    return set(Trainer.get_decay_parameter_names(None, model))


def gpt2():
    sizes = {"n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, bos_token_id=0, eos_token_id=0, **sizes))


@pytest.mark.parametrize("make", [Block, gpt2, lambda: nn.Sequential(Block(), nn.LayerNorm(2))])
def test_what_decays_is_what_decays_in_the_trainer_of_transformers(make):
    model = make()
    named = dict(model.named_parameters())
    found = names_of(decay_groups(named.items(), 0.1, model=model), model)
    assert found[0.1] == decaying_in_the_trainer(model) & named.keys()  # tied: named once
    assert found[0.0] == named.keys() - found[0.1]


def test_without_the_model_no_vector_decays():
    model = Block()
    found = names_of(decay_groups(model.named_parameters(), 0.1), model)
    assert found[0.1] == {"normal.weight", "embed.weight"}


def test_a_group_without_parameters_is_left_out():
    layer = nn.Linear(2, 2, bias=False)
    assert [g["weight_decay"] for g in decay_groups(layer.named_parameters(), 0.3)] == [0.3]
    assert decay_groups([], 0.3) == []
    torch.optim.AdamW(decay_groups(layer.named_parameters(), 0.3))
