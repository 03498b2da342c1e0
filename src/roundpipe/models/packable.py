"""Which weights of a block may be kept in 4 bits: its matrices, whole stacks of experts too.

What chooses between experts stays as it is: a token sent elsewhere is no rounding error. So do
norms, biases (those of stacked experts are matrices by shape), convolutions, and everything outside
the blocks: embeddings and heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_ROUTERS = frozenset({"gate", "router", "wg", "shared_expert_gate"})
_LEAST = 4096  # elements; below, scales and alignment would take what 4 bits save
_NOT_MATRICES = (nn.Embedding, nn.modules.conv._ConvNd)


def packable(block: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters below ``block`` that may be packed, each once."""
    seen: set[int] = set()
    for path, module in block.named_modules():
        if isinstance(module, _NOT_MATRICES) or not _ROUTERS.isdisjoint(path.split(".")[-1:]):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and _is_matrix(module, name, parameter):
                seen.add(id(parameter))
                yield parameter


def _is_matrix(module: nn.Module, name: str, parameter: Tensor) -> bool:
    if parameter.numel() < _LEAST or not parameter.is_floating_point() or "bias" in name:
        return False
    if parameter.dim() == 2:
        return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return parameter.dim() == 3
