"""What no layer may contain yet, one function a rule; each says why and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


def refuse_unsupported(root: nn.Module) -> None:
    """Raise ModelError, naming the place, if a shell of ``root`` could not be exact."""
    for name, module in root.named_modules():
        kind = type(module).__name__
        _check_module(f"{name} ({kind})" if name else kind, module)
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        _check_tensor(name, tensor)


def _check_module(where: str, module: nn.Module) -> None:
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ModelError(
            f"a lazy module has no parameters yet: {where}\nhint: run it once before wrapping"
        )
    if isinstance(module, _NormBase) and module.track_running_stats:
        raise ModelError(
            f"running statistics change in forward, which is not supported yet: {where}\n"
            "hint: use a norm without them (LayerNorm, GroupNorm, track_running_stats=False)"
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
    if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
        raise ModelError(
            f"a parameter of a class of its own is not supported yet: {name}: "
            f"{type(tensor).__name__}\nhint: load the model without quantization"
        )
