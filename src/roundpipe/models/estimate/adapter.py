"""Freezes a model without weights and puts LoRA adapters on it, with the shapes of peft's.

peft itself takes two seconds to import, and puts adapters on routed experts, which are left alone
here: on a mixture of experts ``all-linear`` means attention and shared experts, never the router.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

from torch import Tensor, nn

from roundpipe.errors import ConfigError
from roundpipe.models.estimate.method import ALL_LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.models.estimate.method import Lora, Method

_ROUTERS = {"gate", "router"}  # parts of a module's name


class _Adapted(nn.Module):
    """A linear module with an adapter beside it."""

    def __init__(self, base: nn.Module, inner: int, outer: int, r: int) -> None:
        super().__init__()
        self.base_layer = base
        like = next(base.parameters())
        self.lora_a = nn.Linear(inner, r, bias=False, device=like.device, dtype=like.dtype)
        self.lora_b = nn.Linear(r, outer, bias=False, device=like.device, dtype=like.dtype)
        self.scaling = 2.0

    def forward(self, hidden: Tensor) -> Tensor:
        """The base's output plus the adapter's."""
        result: Tensor = self.base_layer(hidden)
        beside: Tensor = self.lora_b(self.lora_a(hidden)) * self.scaling
        return result + beside


class _Saved(nn.Module):
    """A module that is trained as it is, beside the frozen one that it replaces."""

    def __init__(self, original: nn.Module, copied: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.trained = copied

    def forward(self, *args: Tensor) -> Tensor:
        """The trained copy's output."""
        result: Tensor = self.trained(*args)
        return result


def apply_method(model: nn.Module, method: Method) -> None:
    """Freeze and add adapters in place; the model may be on meta.

    Raises ConfigError where nothing would be trained.
    """
    if method.has_adapter:
        _add_adapters(model, method.lora)
    elif method.name == "freeze":
        patterns = [re.compile(pattern) for pattern in method.unfrozen]
        for name, parameter in model.named_parameters():
            is_trained = any(pattern.search(name) for pattern in patterns)
            parameter.requires_grad_(is_trained and parameter.is_floating_point())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"unfrozen_parameters: no weight is called like {', '.join(method.unfrozen)}\n"
            f"hint: names look like {next(name for name, _ in model.named_parameters())}"
        )


def _add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze ``model`` and put adapters beside its modules, in place.

    Raises ConfigError if no module is meant.
    """
    model.requires_grad_(False)
    chosen = [
        name for name, module in model.named_modules() if _is_chosen(model, name, lora, module)
    ]
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in _linear_names(model)})
        raise ConfigError(
            f"target_modules: no linear module is called like that: {lora.target_modules}\n"
            f"hint: target_modules={ALL_LINEAR}, or some of: {', '.join(kinds)}"
        )
    for name in chosen:
        base = model.get_submodule(name)
        inner, outer = _features(base)
        _replace(model, name, _Adapted(base, inner, outer, lora.r))
    for name in [n for n, _ in model.named_modules() if _ends(n, lora.modules_to_save)]:
        original = model.get_submodule(name)
        _replace(model, name, _Saved(original, _trained_copy(original)))


def _is_chosen(model: nn.Module, name: str, lora: Lora, module: nn.Module) -> bool:
    if not _is_linear(module) or _ends(name, lora.modules_to_save):
        return False
    if lora.target_modules == ALL_LINEAR:
        is_head = module is getattr(model, "get_output_embeddings", lambda: None)()
        return not is_head and _ROUTERS.isdisjoint(name.split("."))
    if isinstance(lora.target_modules, str):
        return re.fullmatch(lora.target_modules, name) is not None
    return _ends(name, lora.target_modules)


def _linear_names(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if _is_linear(module))


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D is a linear module with its weight turned over
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inner, outer = module.get_parameter("weight").shape
    return inner, outer


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _trained_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(True)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, local = name.rpartition(".")
    setattr(model.get_submodule(parent), local, module)
