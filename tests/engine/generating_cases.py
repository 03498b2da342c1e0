"""Small models that generate, and the calls that generate with them."""

from __future__ import annotations

import torch

from roundpipe import RoundPipeRunConfig
from roundpipe.engine import generation
from roundpipe.plan.actions import Op

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
MODELS = {
    "Llama": SIZES,
    "Qwen3": {**SIZES, "tie_word_embeddings": True},
    "Gemma2": {**SIZES, "sliding_window": 5},
    "Mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {**GPT2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "FalconH1": {**SIZES, **MAMBA, "mamba_d_ssm": 64},
    "Mamba2": {**SIZES, "num_heads": 8, "head_dim": 8, "state_size": 4, "chunk_size": 4},
}
NEW = {"max_new_tokens": 8, "min_new_tokens": 8}


def made(name, seed=0, **more):
    """A tiny model of an architecture, with the weights of ``seed``."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **more})
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    return kind(config)


def prompts(rows=3, length=7):
    """Token ids and their mask, the first rows padded left."""
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : rows - row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def within(pipe, device_bytes, *args, newest=False, **kwargs):
    """Generate as if the device held so many bytes."""
    return generation.generate(
        pipe._engine,
        args,
        kwargs,
        device_bytes=device_bytes,
        newest=newest,
        output_device=torch.device("cpu"),
    )


def block_bytes(pipe):
    """What all blocks take."""
    return sum(layer.slot_layout.num_bytes for layer in pipe._layers[1:-1])


def uploaded(pipe):
    """What weights have come up so far."""
    return pipe._engine.traffic.num_bytes[Op.UPLOAD]


def train(pipe, number):
    """One call of training; each number has a batch of its own."""
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(number))
    config = RoundPipeRunConfig(num_microbatch=2)
    return pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config)
