"""Runs one layer without data, forward and backward, as a device would, and notes what it took."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from roundpipe.models.estimate.attention import FusedAttention, fused_everywhere
from roundpipe.models.estimate.meter import Counts, Meter

if TYPE_CHECKING:
    from roundpipe.models.causal_lm import CausalLayer
    from roundpipe.models.shell import TreeShell
    from roundpipe.models.spec import Boundary, Inputs

META = torch.device("meta")


@dataclass
class Counted:
    """One layer at one length: `Counts` of both passes, and bytes of activations as in `Kind`.

    Masks and rotary tables are rebuilt for every visit: they count among the moments.
    """

    forward: Counts
    backward: Counts
    kept: int
    moments: list[int]  # bytes beside ``kept``, below zero before all is kept
    boundary: int
    is_cut: bool = False  # its loss was made in chunks


@dataclass(frozen=True)
class Given:
    """What a layer runs on.

    ``fuse``: the config of a model without fused attention that is to run as if it had it.
    """

    boundary: Boundary
    inputs: Inputs
    context: Any
    dtype: torch.dtype
    is_last: bool = False
    fuse: Any = None

    def metered(self, stack: ExitStack, outside: list[Tensor]) -> Meter:
        """Count from now on what does not lie in ``outside`` or in what is given."""
        given = _leaves((self.boundary, self.inputs.args, self.inputs.kwargs, _plain(self.context)))
        meter = Meter([*outside, *given], self.dtype)
        if self.fuse is not None:
            stack.enter_context(fused_everywhere(meter, self.fuse))
        stack.enter_context(FusedAttention(meter))
        stack.enter_context(meter)
        return meter


def make_shell(layer: CausalLayer) -> TreeShell:
    """A shell of ``layer`` on meta, with sums for its gradients."""
    shell = layer.make_shell(META)
    shell.bind(layer.tensors)
    for parameter in shell.parameters.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return shell


def run_layer(layer: CausalLayer, shell: TreeShell, given: Given) -> Counted:
    """Run ``layer`` as a forward stage does (the last is never in one), then as backward stages do.

    Gradients of parameters are added to sums that are there already, as a device does for all
    microbatches but the first.
    """
    outside = [*layer.tensors.values(), *shell.parameters.values()]
    outside += [p.grad for p in shell.parameters.values() if p.grad is not None]
    moments = [] if given.is_last else _forward_alone(shell, given, outside)
    boundary = tree_map(_leaf, given.boundary)
    with ExitStack() as stack:
        meter = given.metered(stack, outside)
        stack.enter_context(torch.enable_grad())
        saved = _Saved(boundary)
        with saved:
            output = shell(boundary, given.inputs, given.context)
        forward = meter.restart()
        forward.calls -= saved.num_packed
        results = _leaves(output)
        kept = meter.num_alive + saved.num_bytes
        kept -= 0 if given.is_last else meter.num_new(results)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        _run_backward(meter, output.loss if given.is_last else results)
        backward = meter.restart()
    moments += [alive - kept for alive in (*forward.alive, *backward.alive)]
    held = _held_bytes(_plain(given.context))
    moments = [moment + held for moment in moments]
    is_cut = given.is_last and bool(shell.work_bytes)
    return Counted(forward, backward, kept, moments, _num_bytes(given.boundary), is_cut)


def _forward_alone(shell: TreeShell, given: Given, outside: list[Tensor]) -> list[int]:
    with ExitStack() as stack:
        meter = given.metered(stack, outside)
        stack.enter_context(torch.no_grad())
        shell(given.boundary, given.inputs, given.context)
        return meter.counts.alive


def _run_backward(meter: Meter, ends: Any) -> None:
    """Backward from a loss, or from gradients that came from elsewhere and are not counted."""
    if isinstance(ends, Tensor):
        ends.backward()  # type: ignore[no-untyped-call]
        return
    ends = [tensor for tensor in ends if tensor.requires_grad]
    gradients = [meter.leave_out(torch.empty_like(tensor)) for tensor in ends]
    meter.restart()
    if ends:
        torch.autograd.backward(ends, gradients)


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Notes how much of a boundary autograd saves."""

    def __init__(self, boundary: Boundary) -> None:
        self._sizes = {id(leaf.untyped_storage()): leaf for leaf in _leaves(boundary)}
        self._saved: set[int] = set()
        self.num_packed = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.num_packed += 1
        key = id(tensor.untyped_storage())
        if key in self._sizes:
            self._saved.add(key)
        return tensor.detach()

    @property
    def num_bytes(self) -> int:
        """Bytes of the boundary's tensors that were saved."""
        return sum(_num_bytes(self._sizes[key]) for key in self._saved)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    fresh = value.detach()
    return fresh.requires_grad_() if fresh.is_floating_point() else fresh


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _num_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(tree))


def _held_bytes(tree: Any) -> int:
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in _leaves(tree)}
    return sum(storage.nbytes() for storage in storages.values())


def _plain(context: Any) -> Any:
    """Calls of blocks, by layer, as a tree that leaves can be taken from."""
    return [(call.args, dict(call.kwargs)) for call in (context or {}).values()]
