"""What ``gpu_check`` runs: language models built from a config, and the plain loop beside them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

TRAINABLE_RANK = 16


@dataclass(frozen=True)
class Size:
    """A model and a batch. ``tokens`` a step are ``sequences`` times ``length``."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    length: int
    sequences: int
    microbatches: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.length * self.sequences


LARGE = Size(2048, 28, 16, 8, 6144, 151_936, 2048, 64, 32, torch.bfloat16)  # as Qwen3 1.7B
TINY = Size(64, 3, 4, 2, 96, 512, 16, 4, 2, torch.float32)
EXACT = Size(128, 4, 4, 2, 256, 1024, 64, 6, 3, torch.float32)


def build(size: Size, *, on: str, attention: str = "sdpa") -> nn.Module:
    """A decoder of that size with random weights, on the host; drawn on the device ``on``."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (takes seconds)

    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=max(size.hidden // size.heads, 8),
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(size.dtype)
    try:
        with torch.device(on):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.cpu().train()


def with_lora(model: nn.Module) -> nn.Module:
    """The same with adapters on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    config = LoraConfig(
        r=TRAINABLE_RANK,
        lora_alpha=2 * TRAINABLE_RANK,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config).train()


def batch(size: Size, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and labels [sequences, length], on the host."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size.vocabulary, (size.sequences, size.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def plain_step(
    model: nn.Module, data: dict[str, torch.Tensor], microbatches: int, device: torch.device
) -> float:
    """Forward and backward of one batch, microbatch by microbatch; the mean loss over tokens."""
    tokens = data["labels"][:, 1:].numel()
    total = torch.zeros((), device=device)
    for part in range(microbatches):
        piece = {k: v.tensor_split(microbatches)[part].to(device) for k, v in data.items()}
        loss = model(**piece, num_items_in_batch=tokens, use_cache=False).loss
        loss.backward()
        total += loss.detach()
    return float(total)


def resident(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the card, recomputing each block in backward."""
    model.to(device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if hasattr(model, "enable_input_require_grads"):  # frozen embeddings under adapters
        model.enable_input_require_grads()
    return model


def flops(size: Size, *, full: bool) -> float:
    """Of one step with recompute: matrix products of the blocks and the head, attention halved."""
    head_dim = size.hidden // size.heads
    attention = size.hidden * head_dim * (2 * size.heads + 2 * size.kv_heads)
    matrices = size.layers * (attention + 3 * size.hidden * size.intermediate)
    head = size.hidden * size.vocabulary
    passes = 4 if full else 3  # forward, recompute, gradient of inputs, of weights
    scores = 2 * 2 * size.length * size.hidden / 2 * size.layers  # forward, of one token
    return size.tokens * (2 * matrices * passes + 2 * head * (passes - 1) + scores * 4.5)


def matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a long run of square matrix products."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    count = 20
    for _ in range(3):
        a @ b
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        a @ b
    wait(device)
    return 2 * side**3 * count / (time.perf_counter() - begin)


def wait(device: torch.device) -> None:
    """Until all that was put on the card has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, *, steps: int, warm: int) -> float:
    """Seconds of one of ``steps`` calls, after ``warm`` of them."""
    for _ in range(warm):
        work()
    wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        work()
    wait(device)
    return (time.perf_counter() - begin) / steps


def free(device: torch.device) -> None:
    """Give the allocator's cache back, so that what follows starts with a whole card."""
    import gc  # noqa: PLC0415

    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
