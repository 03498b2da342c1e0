"""Modules of bitsandbytes in a shell: a ``Linear4bit`` runs as a plain linear layer.

Its own forward is never run. In evaluation on a CPU with AVX512 it repacks its weights in place,
after which the same bytes mean something else; and it would want the packed bytes where a shell has
unpacked weights. The numbers are those of its forward in training: weights in its compute dtype,
one product, back to the dtype that came in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional

from roundpipe.errors import ModelError
from roundpipe.store.four_bit import is_params4bit, packed_params4bit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor, nn

    from roundpipe.models.shell import Home
    from roundpipe.store.packed import PackedTensor

_STATE = "quant_state"


def _kinds(module: nn.Module) -> list[str]:
    """The classes of bitsandbytes that a module is one of; ``peft`` has some of the same names."""
    classes = type(module).__mro__
    return [cls.__name__ for cls in classes if cls.__module__.startswith("bitsandbytes.")]


def is_linear4bit(module: nn.Module) -> bool:
    """Whether a module is a 4-bit linear layer of bitsandbytes; imports nothing."""
    return any(name == "Linear4bit" for name in _kinds(module))


def state_of(module: nn.Module) -> Any:
    """The quantisation state that hangs beside the weight: not to be copied into a shell."""
    return module.__dict__.get(_STATE) if is_linear4bit(module) else None


def run_plainly_(copied: nn.Module) -> None:
    """Have the copy of a ``Linear4bit`` run over unpacked weights."""
    module: Any = copied
    module.quant_state = None

    def forward(x: Tensor) -> Tensor:
        dtype = module.compute_dtype or x.dtype
        bias = None if module.bias is None else module.bias.to(dtype)
        return functional.linear(x.to(dtype), module.weight.to(dtype), bias).to(x.dtype)

    module.forward = forward


def compute_dtypes(homes: Iterable[Home]) -> dict[str, torch.dtype]:
    """In which dtype 4-bit layers want their weights, by the weights' names."""
    modules = {home.name: home.module for home in homes if is_linear4bit(home.module)}
    wanted = {name: module.__dict__.get("compute_dtype") for name, module in modules.items()}
    return {name: dtype for name, dtype in wanted.items() if dtype is not None}


def values_of(
    homes: Iterable[Home], packed: Mapping[Tensor, PackedTensor]
) -> dict[str, Tensor | PackedTensor]:
    """What a shell is bound to when it runs on the user's own tensors.

    ``packed``: the packed values of parameters that are stand-ins.
    """
    values: dict[str, Tensor | PackedTensor] = {}
    for home in homes:
        tensor = home.tensor
        if is_params4bit(tensor):
            values[home.name] = packed_params4bit(home.name, tensor)
        else:
            values[home.name] = packed.get(tensor, tensor)
    return values


def refuse_other_quantized(where: str, module: nn.Module) -> None:
    """Raise ModelError for a module of bitsandbytes that is not a 4-bit linear layer."""
    for kind in _kinds(module):
        if kind in ("Linear8bitLt", "Embedding8bit"):
            raise ModelError(
                f"weights in 8 bits cannot be used: {where}\n"
                "hint: load the model with load_in_4bit=True, or without quantization"
            )
        if kind == "Embedding4bit":
            raise ModelError(
                f"an embedding in 4 bits is not supported: {where}\nhint: leave embeddings out: "
                "llm_int8_skip_modules"
            )
