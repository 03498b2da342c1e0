"""NEFTune: noise on the output of the embedding, while training only.

    embedding(tokens) + u,   u uniform in ±alpha / sqrt(L · D)   [batch, L, D]

L is the length that a microbatch is padded to (or packed to) and D the width, as in the paper
(arXiv 2310.05914) and in transformers. It is a hook on the model's embedding and so part of the
first layer: what it draws comes from that layer's own generator, which hangs on seed, step and
microbatch alone. So any number of devices draws the same, a recompute draws it again, and a resumed
run goes on drawing what it would have drawn. Weights, config and files know nothing of it.

The embedding has copies that only help to tell other layers' arguments; their table is one value,
repeated, and there the hook draws nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle


def add_neftune(model: nn.Module, alpha: float) -> RemovableHandle:
    """Have the embedding of ``model`` add noise in training mode; ``remove()`` ends it.

    To be called before the model is wrapped, and removed after that is closed. ``model``: a causal
    LM, in ``peft`` or not. Raises ModelError for one that does not say which module embeds.
    """
    embedding = _embedding_of(model)
    if embedding is None:
        raise ModelError(
            f"neftune_noise_alpha: {type(model).__name__} does not say which module embeds tokens"
            "\nhint: neftune_noise_alpha=none"
        )

    def add_noise(module: nn.Module, _given: Any, output: Tensor) -> Tensor | None:
        if not module.training or _is_stand_in(module):
            return None
        bound = noise_bound(output, alpha)
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    return embedding.register_forward_hook(add_noise)


def noise_bound(embedded: Tensor, alpha: float) -> float:
    """How large the noise on ``embedded`` ``[batch, length, width]`` may be."""
    return alpha / math.sqrt(embedded.size(-2) * embedded.size(-1))


def _is_stand_in(module: nn.Module) -> bool:
    """Whether its tables are placeholders, that take no memory."""
    tables = [p for p in module.parameters() if p.numel() > 1]
    return bool(tables) and not any(any(table.stride()) for table in tables)


def _embedding_of(model: Any) -> nn.Module | None:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        found = getattr(base, "get_input_embeddings", lambda: None)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, torch.nn.Module) else None
