"""Which parameters decay: all but biases and norms, as in the Trainer of transformers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

# What the Trainer of transformers 5 looks for in lower-case names (`get_decay_parameter_names`).
_BIAS_OR_NORM = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    *,
    model: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Sort parameters into groups for an optimizer: those that decay, and biases and norms.

    Norms are known by name, and as `nn.LayerNorm` modules of ``model``, whose names the parameters
    then have: the Trainer's rule. Without ``model`` every vector counts as a bias or norm. A group
    without parameters is left out.
    """
    norms = _layer_norms(model) if model is not None else None
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        is_exempt = parameter.dim() < 2 if norms is None else name in norms
        is_exempt = is_exempt or _BIAS_OR_NORM.search(name.lower()) is not None
        (others if is_exempt else decaying).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _layer_norms(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
