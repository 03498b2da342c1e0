"""A causal LM of a few thousand weights with tokenizer and chat template, as a folder on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def tiny_tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIAL])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(*, tied: bool = True, num_layers: int = 2, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    usual = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    config = LlamaConfig(
        **usual | sizes,
        vocab_size=260,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=257,
        pad_token_id=258,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def write_tiny_folder(
    folder: Path, *, tied: bool = True, template: str | None = TEMPLATE, **sizes: int
) -> Path:
    tiny_model(tied=tied, **sizes).save_pretrained(folder)
    tiny_tokenizer(template=template).save_pretrained(folder)
    return folder


def write_tiny_data(path: Path, *, count: int = 12) -> Path:
    """Questions and answers of different lengths."""
    rows = [
        {
            "question": f"{'so ' * (i % 4)}what is {i} + {i}?",
            "answer": f"it is {2 * i}" * (1 + i % 3),
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
