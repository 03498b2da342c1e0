"""Which chain a module becomes."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ModelError
from roundpipe.models.mended import mend
from roundpipe.models.sequential import sequential_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from roundpipe.models.spec import ModelSpec
    from roundpipe.store.packed import PackedTensor

logger = logging.getLogger(__name__)


def spec_for(module: nn.Module, packed: Mapping[Tensor, PackedTensor] | None = None) -> ModelSpec:
    """Make the chain of a module: a Hugging Face causal LM by structure, others by their children.

    ``packed``: the packed values of parameters that are stand-ins, see `roundpipe.store.frozen`.
    Parameters that a causal LM's forward never reads, given text, are frozen (a vision tower).
    Raises ModelError, with the reason and the way out, for what cannot be run exactly, and for a
    model with an encoder, which is no chain.
    """
    if isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
        raise ModelError(
            f"a module that torch.compile made cannot be split: {type(inner).__name__}\n"
            "hint: wrap the module that was compiled: compiled._orig_mod"
        )
    base = _transformers_model(module)
    if base is None:
        return sequential_spec(module)
    if getattr(base.config, "is_encoder_decoder", False):
        raise ModelError(
            f"an encoder and a decoder are not one chain: {type(base).__name__}\n"
            "hint: wrap_model_to_roundpipe(model) runs each as its own, nn.Sequential(model) as "
            "one layer"
        )
    if not base.can_generate():
        logger.warning(
            "%s has no head that makes text and runs as one layer, which takes its whole size of a "
            "device; AutoModelForCausalLM loads one that is split",
            type(base).__name__,
        )
        return sequential_spec(module)
    from roundpipe.models.causal_lm import causal_lm_spec  # noqa: PLC0415 (imports late)

    mend(base)
    with torch.device("cpu"):  # where the model is, whatever the caller's default device is
        spec = causal_lm_spec(module, packed)
    _freeze_unread(spec)
    return spec


def is_causal_lm(module: nn.Module) -> bool:
    """Whether a module is split by structure: a model of transformers that makes text."""
    base = _transformers_model(module)
    if base is None or getattr(base.config, "is_encoder_decoder", False):
        return False
    return bool(base.can_generate())


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, adapted by peft or not."""
    return _transformers_model(module) is not None


def _transformers_model(module: nn.Module) -> Any:
    """The model of transformers that a module is or adapts; imports nothing: its maker did."""
    if (peft := sys.modules.get("peft")) is not None and isinstance(module, peft.PeftModel):
        module = module.get_base_model()
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    return module


def _freeze_unread(spec: ModelSpec) -> None:
    """Freeze what no layer reads, and say so: it stays where it is, and in what is saved."""
    read = {id(tensor) for layer in spec.layers for tensor in layer.tensors.values()}
    unread = {
        name: parameter
        for name, parameter in spec.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in read
    }
    for parameter in unread.values():
        parameter.requires_grad_(False)
    if unread:
        count = sum(parameter.numel() for parameter in unread.values())
        logger.info(
            "text does not reach %d of the parameters of %s, which stay as they are: %s, …",
            count,
            type(spec.module).__name__,
            next(iter(unread)),
        )
