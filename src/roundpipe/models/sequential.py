"""`nn.Sequential` as its children, and any other module as one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from roundpipe.errors import ModelError
from roundpipe.models.changes import TreeWatch
from roundpipe.models.refusals import refuse_unsupported
from roundpipe.models.shell import TensorNames, TreeCopy, TreeShell, find_homes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.shell import Home, Run
    from roundpipe.models.spec import Boundary, Inputs


def _run_first(module: nn.Module, _boundary: Boundary, inputs: Inputs, _context: Any) -> Boundary:
    return module(*inputs.args, **(inputs.kwargs or {}))


def _run_later(module: nn.Module, boundary: Boundary, _inputs: Inputs, _context: Any) -> Boundary:
    return module(boundary)  # a tuple too is one argument, as nn.Sequential passes it


def _run_and_look(run: Run) -> Run:
    """``run`` for a layer below the last: what it returns is cut apart, tensor by tensor."""

    def looking(module: nn.Module, *given: Any) -> Boundary:
        return _open(module, run(module, *given))

    return looking


def _open(module: nn.Module, result: Boundary) -> Boundary:
    """``result``, whose tensors can all be found: one in an unknown object would lose its graph."""
    if isinstance(result, Tensor):
        return result
    for leaf in pytree.tree_leaves(result):
        held = getattr(leaf, "__dict__", {}).values()
        if not isinstance(leaf, Tensor) and any(isinstance(each, Tensor) for each in held):
            kind = type(leaf).__name__
            raise ModelError(
                f"{type(module).__name__} returns tensors in a class that nobody can look into: "
                f"{kind}\nhint: torch.utils._pytree.register_dataclass({kind}), or "
                "register_pytree_node for other classes"
            )
    return result


@dataclass(frozen=True, eq=False)
class ModuleLayer:
    """One module called with the inputs (the first) or with the boundary before it."""

    name: str
    module: nn.Module
    is_first: bool
    names: TensorNames = field(repr=False)
    homes: Sequence[Home] = field(repr=False)
    is_last: bool = True

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer of the module, by full name in the user's model."""
        return {home.name: home.tensor for home in self.homes}

    def make_shell(self, device: torch.device) -> TreeShell:
        """A new shell for ``device``; copies no weights."""
        tree = TreeCopy(self.module, self.names, device, homes=self.homes)
        run = _run_first if self.is_first else _run_later
        return TreeShell(tree, run if self.is_last else _run_and_look(run))


class NoContext:
    """The context of a chain whose layers need nothing but the boundary."""

    def sync_mode(self) -> None:
        """Nothing to take over."""

    def __call__(self, inputs: Inputs, layers: range) -> None:
        """Nothing to rebuild."""


@dataclass(frozen=True, eq=False)
class SequentialSpec:
    """A chain of modules, each called with what the one before returned."""

    module: nn.Module
    layers: Sequence[ModuleLayer]
    computes_loss: bool = False
    takes_num_items: bool = False
    shifts_labels: bool = True
    num_predicted: int = 0
    _watch: TreeWatch = field(kw_only=True, repr=False)

    def refuse_lost_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Any argument may want one: the first layer alone reads them."""

    def needs_inputs(self, layer: int) -> bool:
        """Only the first layer reads the microbatch's inputs."""
        return layer == 0

    def make_context(self, device: torch.device) -> NoContext:
        """A context that holds nothing."""
        return NoContext()

    def changed_since_wrapping(self) -> str | None:
        """What hooks or attributes of the tree changed since it was wrapped, or None."""
        return self._watch.difference()

    def accept_changes(self) -> None:
        """Take the module's attributes as they are now."""
        self._watch.retake()


def sequential_spec(module: nn.Module) -> SequentialSpec:
    """Make a chain of the children of an `nn.Sequential`; any other module is one layer.

    A nested Sequential stays one layer. A child that stands in the list twice, or a parameter that
    two children share, is legal: it has one name and one owner, the first. Raises ModelError for
    what cannot be run exactly.
    """
    refuse_unsupported(module)
    names = TensorNames(module)
    children = _children(module)
    layers = [
        ModuleLayer(
            name,
            child,
            index == 0,
            names,
            find_homes(child, names),
            is_last=index == len(children) - 1,
        )
        for index, (name, child) in enumerate(children)
    ]
    for layer in layers:
        layer.make_shell(torch.device("cpu"))  # what cannot be copied is refused now, not later
    return SequentialSpec(module, layers, _watch=TreeWatch(module))


def runs_children_in_turn(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` that does what one does."""
    own_forward = type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__
    return isinstance(module, nn.Sequential) and own_forward


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    if not runs_children_in_turn(module):
        return [(type(module).__name__, module)]
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ModelError(
            f"a hook on the whole {type(module).__name__} would not run: its children are run "
            "one by one\nhint: register it on the first or the last child"
        )
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not children:
        raise ModelError(f"no layers: an empty {type(module).__name__}\nhint: add a module to it")
    return children
