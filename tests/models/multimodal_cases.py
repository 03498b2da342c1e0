"""Tiny models that see: a text decoder of two layers beside a vision tower of two or three."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForImageTextToText

from roundpipe.models.mended import mend

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = _TEXT | {"head_dim": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_IMAGE = 90
_QWEN = {
    "image_token_id": _IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS = {
    "gemma3": lambda: transformers.Gemma3Config(
        text_config=_HEADS | {"sliding_window": 8},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=_IMAGE,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    "gemma4": lambda: transformers.Gemma4Config(  # inputs of each layer, shared keys and values
        text_config=_HEADS
        | {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
        },
        vision_config=_VISION
        | {"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 16}
        | {"position_embedding_size": 64},
        audio_config=None,
        image_token_id=_IMAGE,
        boi_token_id=91,
        eoi_token_id=92,
        video_token_id=93,
        audio_token_id=94,
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config=_TEXT | {"rope_parameters": _ROPE},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        **_QWEN,
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config=_HEADS | {"rope_parameters": _ROPE}, vision_config=_QWEN_VISION, **_QWEN
    ),
    "qwen3_vl_moe": lambda: transformers.Qwen3VLMoeConfig(
        text_config=_HEADS | _MOE | {"rope_parameters": _ROPE}, vision_config=_QWEN_VISION, **_QWEN
    ),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=_HEADS | {"model_type": "mistral"},
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=_IMAGE,
    ),
    "llama4": lambda: transformers.Llama4Config(
        text_config=_HEADS
        | {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "moe_layers": [1],
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
        },
        vision_config=_VISION
        | {
            "num_channels": 3,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=_IMAGE,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    "large_tower": lambda: transformers.LlavaConfig(
        text_config=_HEADS | {"model_type": "llama"},
        vision_config=_VISION | {"model_type": "clip_vision_model", "intermediate_size": 1024},
        image_token_index=_IMAGE,
    ),
}


def model(kind: str, *, more_tokens: int = 0):
    """A model of one kind with weights that tell each other apart, without dropout.

    ``more_tokens``: that its vocabulary holds before the tokens that stand for images.
    """
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.get_text_config().vocab_size += more_tokens
    for name, value in list(vars(config).items()):
        if type(value) is int and _IMAGE <= value < _IMAGE + 4:
            setattr(config, name, value + more_tokens)
    made = AutoModelForImageTextToText.from_config(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    mend(made)
    return made.eval()


def batch():
    """Four short rows of text, one of them padded."""
    ids = torch.randint(3, 80, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }
