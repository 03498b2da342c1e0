"""An argument that wants a gradient gets all of it, or is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roundpipe.engine.microbatch import RoundPipePackedData
from roundpipe.errors import ModelError
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.lost_gradients import LostGradients

EMBEDDED = torch.randn(2, 9, 32, requires_grad=True)


def test_what_only_the_prefix_reads_may_want_one(tiny):
    spec = causal_lm_spec(tiny.make("llama", tie_word_embeddings=True))
    spec.refuse_lost_gradients((), {"inputs_embeds": EMBEDDED, "attention_mask": torch.ones(2, 9)})
    spec.refuse_lost_gradients((), {"encoder_hidden_states": EMBEDDED.detach()})


@pytest.mark.parametrize("given", [EMBEDDED, RoundPipePackedData([EMBEDDED.detach(), EMBEDDED])])
def test_what_the_context_hands_to_blocks_may_not(tiny, given):
    spec = causal_lm_spec(tiny.make("gpt2", n_embd=32, n_layer=2, add_cross_attention=True))
    said = "a gradient that would be lost: encoder_hidden_states\nhint: "
    with pytest.raises(ModelError, match=said):
        spec.refuse_lost_gradients((), {"encoder_hidden_states": given})


def test_a_positional_argument_is_named(tiny):
    spec = causal_lm_spec(tiny.make("llama"))
    mask = torch.zeros(2, 1, 9, 9, requires_grad=True)
    with pytest.raises(ModelError, match="lost: attention_mask"):
        spec.refuse_lost_gradients((torch.zeros(2, 9, dtype=torch.long), mask), {})


def test_embeddings_that_are_read_again_further_up_may_not(tiny):
    split = causal_lm_spec(tiny.make("llama")).split
    embedding = split.root.get_input_embeddings()
    again = {home for home in split.outside if home.module is embedding}
    late = LostGradients(replace(split, read_after=split.read_after | again))
    with pytest.raises(ModelError, match="lost: inputs_embeds"):
        late.refuse((), {"inputs_embeds": EMBEDDED})
