"""Which submodules of a model that is no chain become a `RoundPipe` of their own.

A *part* is a submodule that runs on devices; what calls it, the *outer* code, runs on the host. A
walk from the root down takes the first of these that holds: an ``nn.Sequential`` is a part of many
layers; a module of enough parameters of its own, or of no others, or small enough as a whole, is a
part of one; each element of an ``nn.ModuleList`` is one; anything else is looked into.

A tensor that several parts hold, or a part and the outer code, is *lent*: it stays with the outer
code and goes into each of those parts as an argument, so that it is stored once and its gradients
add up in the caller's graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from roundpipe.models.sequential import runs_children_in_turn

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """When a submodule becomes a part.

    ``lower_bytes`` of its own parameters are enough; so is a total of at most ``upper_bytes``.
    What holds a module of ``skipped`` is never one.
    """

    lower_bytes: int
    upper_bytes: float
    skipped: Container[nn.Module] = ()


@dataclass(frozen=True)
class Loan:
    """One place below a part's module where a lent tensor hangs; it has other places outside."""

    path: str  # of the module, from the part's
    local: str
    is_parameter: bool
    tensor: Tensor = field(repr=False)


@dataclass(frozen=True)
class Part:
    """A submodule to be wrapped, its name in the model, and what is lent to it."""

    name: str
    module: nn.Module
    loans: tuple[Loan, ...] = ()


def num_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers of a module, each counted once."""
    return sum(map(_bytes, _tensors(module)))


def is_part(module: nn.Module, rules: Rules, *, is_element: bool = False) -> bool:
    """Whether a module is wrapped as it is; ``is_element``: of an ``nn.ModuleList``."""
    if not _has_forward(module) or any(each in rules.skipped for each in module.modules()):
        return False
    if not any(True for _ in module.parameters()):
        return False
    if runs_children_in_turn(module) or is_element:
        return True
    own = sum(_bytes(tensor) for tensor in module._parameters.values())
    if own >= rules.lower_bytes or num_bytes(module) <= rules.upper_bytes:
        return True
    return not any(True for child in module.children() for _ in child.parameters())


def find_parts(root: nn.Module, rules: Rules) -> list[Part]:
    """The parts of ``root``, which is none itself, in the order of its tree.

    An embedding whose table others hold too only looks up: it stays with the outer code.
    """
    found = list(_walk(root, "", rules, set()))
    held = Counter(id(tensor) for _, module in found for tensor in _tensors(module))
    inside = {id(each) for _, module in found for each in module.modules()}
    outside = [module for module in root.modules() if id(module) not in inside]
    held.update(id(t) for module in outside for t in _hung(module))
    parts = []
    for name, module in found:
        loans = tuple(
            Loan(path, local, is_parameter, tensor)
            for path, owner in module.named_modules()
            for places, is_parameter in ((owner._parameters, True), (owner._buffers, False))
            for local, tensor in places.items()
            if tensor is not None and held[id(tensor)] > 1
        )
        if not (loans and isinstance(module, nn.Embedding)):
            parts.append(Part(name, module, loans))
    return parts


def _walk(
    module: nn.Module, name: str, rules: Rules, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, nn.ModuleList)
    for local, child in module._modules.items():
        if child is None or id(child) in seen or child in rules.skipped:
            continue
        seen.add(id(child))
        full = f"{name}.{local}" if name else local
        if is_part(child, rules, is_element=is_list):
            yield full, child
        else:
            yield from _walk(child, full, rules, seen)


def _bytes(tensor: Tensor | None) -> int:
    if tensor is None or is_lazy(tensor):  # what a lazy one will take is not known
        return 0
    return tensor.numel() * tensor.element_size()


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _hung(module: nn.Module) -> list[Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _tensors(module: nn.Module) -> list[Tensor]:
    return list({id(t): t for each in module.modules() for t in _hung(each)}.values())
