"""Freezes a model without weights and puts LoRA adapters on it, with the shapes of peft's.

peft itself takes two seconds to import. On a mixture of experts ``all-linear`` means attention and
shared experts, never the router; stacked experts get adapters where ``target_parameters`` says so.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.estimate.method import ALL_LINEAR
from roundpipe.models.experts import is_stacked
from roundpipe.models.freeze import unfrozen
from roundpipe.models.routed import is_routed
from roundpipe.models.text_only import other_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.models.estimate.method import Lora, Method


_NAME = "default"  # peft's, of the only adapter


class _Adapted(nn.Module):
    """A linear module with an adapter beside it."""

    def __init__(self, base: nn.Module, inner: int, outer: int, r: int) -> None:
        super().__init__()
        self.base_layer = base
        like = next(base.parameters())
        self.lora_a = nn.Linear(inner, r, bias=False, device=like.device, dtype=like.dtype)
        self.lora_b = nn.Linear(r, outer, bias=False, device=like.device, dtype=like.dtype)
        self.scaling = 2.0

    @property
    def weight(self) -> Any:
        """The base's, which some models read beside calling it; peft's has it too."""
        return self.base_layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The base's output plus the adapter's."""
        result: Tensor = self.base_layer(hidden)
        beside: Tensor = self.lora_b(self.lora_a(hidden)) * self.scaling
        return result + beside


class _AdaptedStack(nn.Module):
    """Experts with an adapter on one of their stacks, as `roundpipe.models.experts` reads it."""

    def __init__(self, base: nn.Module, stack: Tensor, name: str, sides: _Sides) -> None:
        super().__init__()
        self.parameter_name = name
        self.base_layer = base
        self.num_experts, rank = stack.shape[0], sides.r * stack.shape[0]
        to = {"device": stack.device, "dtype": stack.dtype}
        self.lora_A = nn.ModuleDict({_NAME: nn.Linear(sides.inner, rank, bias=False, **to)})
        self.lora_B = nn.ModuleDict({_NAME: nn.Linear(rank, sides.outer, bias=False, **to)})
        self.scaling = {_NAME: 2.0}
        self.active_adapters = [_NAME]
        self.disable_adapters = self.merged = False

    def forward(self, *_: Any) -> Tensor:
        """Refuse: only a shell runs it, which puts another in its place."""
        raise ModelError(f"adapters on these experts cannot be estimated: {self.parameter_name}")


@dataclass(frozen=True)
class _Sides:
    """Of an adapter: rank, and the sides of what it is added to."""

    r: int
    inner: int
    outer: int


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

    Raises ConfigError where nothing would be trained, and for a pattern that names nothing.
    """
    if method.has_adapter:
        _add_adapters(model, method.lora)
    elif method.name == "freeze":
        trained = unfrozen(model, method.unfrozen)
        model.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)


def _add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze ``model`` and put adapters beside its modules, in place.

    Raises ConfigError if no module is meant.
    """
    model.requires_grad_(False)
    towers = tuple(f"{part}." for part in other_parts(model))  # text does not reach them
    chosen = [
        name
        for name, module in model.named_modules()
        if _is_chosen(model, name, lora, module) and not f"{name}.".startswith(towers)
    ]
    stacks = [(n, key) for key in sorted(lora.target_parameters) for n in _stacks(model, key)]
    if not chosen and not stacks:
        kinds = sorted({name.rpartition(".")[2] for name in _linear_names(model)})
        raise ConfigError(
            f"target_modules: no linear module is called like that: {lora.target_modules}\n"
            f"hint: target_modules={ALL_LINEAR}, or some of: {', '.join(kinds)}"
        )
    for name in chosen:
        base = model.get_submodule(name)
        inner, outer = _features(base)
        _replace(model, name, _Adapted(base, inner, outer, lora.r))
    for name, key in stacks:
        _adapt_stack(model, name, key.rpartition(".")[2], lora.r)
    for name in [n for n, _ in model.named_modules() if _ends(n, lora.modules_to_save)]:
        original = model.get_submodule(name)
        _replace(model, name, _Saved(original, _trained_copy(original)))


def _stacks(model: nn.Module, key: str) -> list[str]:
    """Names of the stacked experts that have a parameter called like ``key``."""
    return [
        name
        for name, module in model.named_modules()
        if is_stacked(module)
        for local in module._parameters
        if _ends(f"{name}.{local}", (key,))
    ]


def _adapt_stack(model: nn.Module, name: str, local: str, r: int) -> None:
    around = experts = model.get_submodule(name)
    while isinstance(experts, _AdaptedStack):
        experts = experts.base_layer
    stack = experts.get_parameter(local)
    outer, inner = stack.shape[-2:]
    if experts.is_transposed:
        outer, inner = inner, outer
    _replace(model, name, _AdaptedStack(around, stack, local, _Sides(r, inner, outer)))


def _is_chosen(model: nn.Module, name: str, lora: Lora, module: nn.Module) -> bool:
    if not _is_linear(module) or _ends(name, lora.modules_to_save):
        return False
    if lora.target_modules == ALL_LINEAR:
        is_head = module is getattr(model, "get_output_embeddings", lambda: None)()
        return not is_head and not is_routed(name)
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
