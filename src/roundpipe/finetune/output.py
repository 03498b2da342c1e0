"""Write what was trained so that stock transformers and stock peft load it.

Weights come from the trainer as a mapping of names to host tensors. Many of them are views of one
large buffer; saved as they are, every file format would see one shared storage. Each is therefore
given a storage of its own over the same memory: nothing is copied, and weights that are really tied
still share theirs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from roundpipe.finetune.model import quiet_transformers
from roundpipe.finetune.peft_quietly import PeftModel, get_peft_model_state_dict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def save_result(
    folder: Path,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write model or adapter, tokenizer, chat template and generation settings into ``folder``.

    ``weights`` are the newest weights by the names of ``model``; those in ``model`` itself are not
    read. An adapter is written alone, without its base model.
    """
    alone = {name: with_own_storage(tensor) for name, tensor in weights.items()}
    with quiet_transformers():
        if isinstance(model, PeftModel):
            _save_adapter(folder, model, alone)
        else:
            model.save_pretrained(folder, state_dict=alone)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as the whole of a storage over the same memory; copied if scattered."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.numel() == 0:
        return plain.cpu().contiguous().clone()
    raw = torch.from_numpy(plain.reshape(-1).view(torch.uint8).numpy())
    return raw.view(plain.dtype).view(plain.shape)


def _save_adapter(folder: Path, model: PeftModel, weights: dict[str, Tensor]) -> None:
    """As ``PeftModel.save_pretrained``, but it never asks the hub whether the vocabulary grew."""
    adapter = model.peft_config[model.active_adapter]
    tensors = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    separate = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(separate, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    was_inference = adapter.inference_mode
    adapter.inference_mode = True
    try:
        adapter.save_pretrained(str(folder))
    finally:
        adapter.inference_mode = was_inference
    generation = getattr(model.get_base_model(), "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
