"""What no layer may contain, one function a rule; each says why and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from roundpipe.errors import ModelError
from roundpipe.models.four_bit import is_linear4bit, refuse_other_quantized
from roundpipe.store.four_bit import is_params4bit, packed_params4bit

if TYPE_CHECKING:
    from torch import Tensor


def refuse_unsupported(root: nn.Module) -> None:
    """Raise ModelError, naming the place, if a shell of ``root`` could not be exact."""
    _check_quantization(root)
    for name, module in root.named_modules():
        kind = type(module).__name__
        _check_module(f"{name} ({kind})" if name else kind, module)
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        _check_tensor(name, tensor)


def _check_quantization(root: Any) -> None:
    """Refuse weights in few bits whose modules know what they mean, and nobody else."""
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    asked = getattr(getattr(base, "hf_quantizer", None), "quantization_config", None)
    method = getattr(asked, "quant_method", None)
    method = getattr(method, "value", method)
    if method not in (None, "bitsandbytes") and not getattr(asked, "dequantize", False):
        raise ModelError(
            f"weights in a form that is not supported: {method}\n"
            "hint: load the model as its authors published it; load_in_4bit=True of bitsandbytes "
            "makes it small"
        )


def _check_module(where: str, module: nn.Module) -> None:
    refuse_other_quantized(where, module)
    held = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(map(is_params4bit, held)) and not is_linear4bit(module):
        raise ModelError(
            f"weights in 4 bits outside a Linear4bit: {where}\nhint: leave this module out of "
            "quantization: llm_int8_skip_modules"
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ModelError(
            f"a lazy module has no parameters yet: {where}\nhint: run it once before wrapping"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise ModelError(f"sparse gradients are not supported: {where}\nhint: use sparse=False")
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"a scripted module cannot be copied without its weights: {where}\n"
            "hint: wrap the module it was scripted from"
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ModelError(f"not initialised yet: {name}\nhint: run the model once before wrapping")
    if tensor.is_meta:
        raise ModelError(
            f"on the meta device, it has no values: {name}\nhint: load the weights before wrapping"
        )
    if tensor.device.type != "cpu":
        raise ModelError(
            f"weights live in host memory, but {name} is on {tensor.device}\n"
            "hint: move the model to the CPU first: model.cpu()"
        )
    if is_params4bit(tensor):
        packed_params4bit(name, tensor)
    elif isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
        raise ModelError(
            f"a parameter of a class of its own is not supported: {name}: "
            f"{type(tensor).__name__}\nhint: load the model without quantization"
        )
