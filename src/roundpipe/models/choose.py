"""Which chain a module becomes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from roundpipe.models.sequential import sequential_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from roundpipe.models.spec import ModelSpec
    from roundpipe.store.packed import PackedTensor


def spec_for(module: nn.Module, packed: Mapping[Tensor, PackedTensor] | None = None) -> ModelSpec:
    """Make the chain of a module: a Hugging Face causal LM by structure, others by their children.

    ``packed``: the packed values of parameters that are stand-ins, see `roundpipe.store.frozen`.
    Raises ModelError, with the reason and the way out, for what cannot be run exactly.
    """
    if _is_causal_lm(module):
        from roundpipe.models.causal_lm import causal_lm_spec  # noqa: PLC0415 (imports late)

        with torch.device("cpu"):  # where the model is, whatever the caller's default device is
            return causal_lm_spec(module, packed)
    return sequential_spec(module)


def _is_causal_lm(module: nn.Module) -> bool:
    """Whether a module generates text; imports nothing: what made it has been imported."""
    if (peft := sys.modules.get("peft")) is not None and isinstance(module, peft.PeftModel):
        module = module.get_base_model()
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return False
    return bool(module.can_generate()) and not getattr(module.config, "is_encoder_decoder", False)
