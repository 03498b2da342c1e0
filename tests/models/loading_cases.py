"""Tiny causal LMs saved to disk, in many files, and how to compare what is loaded of them."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from roundpipe.store.packed import PackedTensor

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2}


def config(kind):
    """A config of one kind of model, with few layers of few weights."""
    sizes = _SIZES
    no_head_dim = {key: value for key, value in sizes.items() if key != "head_dim"}
    return {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, tie_word_embeddings=False),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **sizes, sliding_window=8, tie_word_embeddings=True
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64
        ),
        "phi3": lambda: transformers.Phi3Config(**no_head_dim),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **{**sizes, **_MOE}, num_experts=4, moe_intermediate_size=32
        ),
        "mixtral": lambda: transformers.MixtralConfig(**{**sizes, **_MOE}, num_local_experts=4),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **{**sizes, **_MOE, "intermediate_size": 64}, num_local_experts=4
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**no_head_dim, **_MOE, "num_key_value_heads": 4},
            n_routed_experts=4,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
    }[kind]()


def save(folder, kind, *, dtype=torch.bfloat16, shard="60KB"):
    """Save a model of one kind with weights that tell each other apart; returns it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind), dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def same_state(plain, loaded):
    """Whether two models hold the same names, dtypes and bits, buffers that no file has too."""
    ours, theirs = loaded.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    tensors = [(name, ours[name], theirs[name]) for name in ours]
    buffers = dict(plain.named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    tensors += [(name, tensor, buffers[name]) for name, tensor in loaded.named_buffers()]
    for name, mine, their in tensors:
        assert mine.dtype == their.dtype, name
        assert torch.equal(mine, their), name
    names = [[name for name, _ in model.named_parameters()] for model in (plain, loaded)]
    assert names[0] == names[1]
    return True


def unpacked(loaded):
    """Every parameter of a loaded model by name, unpacked where it is packed."""
    values = {}
    for base in loaded.bases:
        for name, tensor in base.tensors.items():
            values[name] = tensor.detach()
            if name in base.packed:
                parts = {e: base.segment.views[e] for e in base.packed[name].parts.values()}
                values[name] = PackedTensor(base.packed[name], parts).unpack()
    return values


def edit_files(folder, change):
    """Change the tensors of every file of a folder, and its index accordingly."""
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = change(load_file(path))
        save_file(tensors, path, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
