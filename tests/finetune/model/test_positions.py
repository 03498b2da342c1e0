"""Sequences longer than the model: refused or told before the first step."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
)

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.positions import check_lengths, longest_known

GPT2 = GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16)
GPTJ = GPTJConfig(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16, rotary_dim=4)
OPT = OPTConfig(
    vocab_size=40,
    hidden_size=8,
    ffn_dim=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
    word_embed_proj_dim=8,
)
LLAMA = LlamaConfig(
    vocab_size=16,  # as many as positions: the table of tokens is none of positions
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)


def told(config: PretrainedConfig, *lengths: int) -> list[str]:
    said: list[str] = []
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    check_lengths(model, np.array(lengths, dtype=np.int64), said.append)
    return said


@pytest.mark.parametrize("config", [GPT2, OPT, GPTJ], ids=["gpt2", "opt", "gptj"])
def test_a_sample_longer_than_the_table_of_positions_is_refused(config: PretrainedConfig) -> None:
    assert told(config, 3, 16) == []
    with pytest.raises(ConfigError) as caught:
        told(config, 3, 17)
    assert str(caught.value) == (
        "a sample has 17 tokens, and the model has positions for 16\nhint: max_length=16"
    )


def test_rotary_positions_go_on_and_that_is_said() -> None:
    assert told(LLAMA, 3, 16) == []
    (line,) = told(LLAMA, 3, 17, 40)
    assert line.startswith("warning: 2 of 3 samples are longer than the 16 tokens")
    assert line.endswith("max_length=16 cuts them")


def test_a_stretched_model_takes_the_stretched_length() -> None:
    config = LlamaConfig(
        max_position_embeddings=16,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e4,
        },
    )
    holder = nn.Module()
    holder.config = config  # type: ignore[assignment]
    assert longest_known(holder) == 64


def test_no_length_is_told_where_there_is_no_sample() -> None:
    assert told(LLAMA) == []
