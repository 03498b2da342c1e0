"""Joins a pass over the devices to the caller's own autograd graph.

The pass runs without a graph. What it returns becomes the output of one node, and that node's
backward runs the other pass. Everything the node takes and returns lies on the host: on a card its
backward would run in a thread that the devices' own backward needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.engine.microbatch import RoundPipePackedData
from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Given:
    """What a caller calls a model with: host copies without a graph, and what wants a gradient.

    ``wanted`` marks it in the pytree of both arguments; ``leaves`` are its tensors: one for each
    mark, or as many as there are microbatches where they come packed.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: tuple[bool, ...]
    _marked: tuple[Any, ...]  # a tensor or packed tensors for each mark

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
        """Look through a call's arguments."""
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        wanted = tuple(map(_wants_gradient, flat))
        args_, kwargs_ = pytree.tree_unflatten(list(map(_cut, flat)), spec)
        marked = tuple(leaf for leaf, is_wanted in zip(flat, wanted, strict=True) if is_wanted)
        return cls(args_, kwargs_, wanted, marked)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that want a gradient, in order."""
        return tuple(
            tensor
            for leaf in self._marked
            for tensor in (leaf if isinstance(leaf, RoundPipePackedData) else (leaf,))
        )

    def gradients(self, parts: Sequence[Gradients], sizes: Sequence[int]) -> list[Tensor | None]:
        """The gradient of each of ``leaves``, from those of microbatches of so many samples.

        What was cut along the batch is joined along it; what all of them read is added up. Raises
        ConfigError for what a rule of the caller has cut otherwise.
        """
        found: list[Tensor | None] = []
        for at, leaf in enumerate(self._marked):
            of_leaf = [part[at] for part in parts]
            if isinstance(leaf, RoundPipePackedData):
                found += of_leaf
            else:
                found.append(_whole(leaf, of_leaf, sizes))
        return found


def _wants_gradient(leaf: Any) -> bool:
    if isinstance(leaf, RoundPipePackedData):
        return any(map(_wants_gradient, leaf))
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _cut(leaf: Any) -> Any:
    """The same without a graph, on the host and in memory of its own.

    A device's streams know nothing of the caller's, who may still be writing a tensor of a card;
    bringing it to the host waits for that.
    """
    if isinstance(leaf, RoundPipePackedData):
        return RoundPipePackedData(map(_cut, leaf))
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def own_copy(tree: Any) -> Any:
    """A tree's tensors copied to the host, without a graph; everything else as it is."""
    return pytree.tree_map(_cut, tree)


def detached(tree: Any) -> Any:
    """A tree's tensors without their graph, as they are."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def _whole(leaf: Tensor, parts: Gradients, sizes: Sequence[int]) -> Tensor | None:
    some = [part for part in parts if part is not None]
    if not some:
        return None
    if leaf.dim() > 0 and leaf.shape[0] == sum(sizes):
        missing = [leaf.new_zeros((size, *leaf.shape[1:]), device="cpu") for size in sizes]
        joined = [
            zeros if part is None else part for part, zeros in zip(parts, missing, strict=True)
        ]
        return torch.cat(joined).to(leaf.device)
    if any(part.shape != leaf.shape for part in some):
        raise ConfigError(
            f"an argument of shape {tuple(leaf.shape)} wants a gradient and was not cut along its "
            "first dimension\nhint: cut it before the call and pass RoundPipePackedData"
        )
    total = some[0]
    for part in some[1:]:
        total = total + part
    return total.to(leaf.device)


def outputs_in_graph(
    outputs: Sequence[Any],
    leaves: Sequence[Tensor],
    backward: Callable[[list[list[Tensor | None]]], Gradients],
) -> list[Any]:
    """The microbatches' outputs as results of one node over ``leaves``.

    ``backward`` is called with the gradients of the floating tensors of each microbatch's output,
    in order, and returns the leaves'. It may be called once, unless the graph is kept.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    tensors = [leaf for found, _ in flat for leaf in found if isinstance(leaf, torch.Tensor)]
    counts = [sum(isinstance(leaf, torch.Tensor) for leaf in found) for found, _ in flat]

    def by_microbatch(gradients: Gradients) -> Gradients:
        parts: list[list[Tensor | None]] = []
        at = 0
        for count in counts:
            places = range(at, at + count)
            parts.append([gradients[i] for i in places if is_differentiable(tensors[i])])
            at += count
        return backward(parts)

    # So that there is a graph without leaves too.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    made = iter(_Node.apply(_Held(tensors, by_microbatch), anchor, *leaves))  # type: ignore[no-untyped-call]
    return [
        pytree.tree_unflatten(
            [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in found], spec
        )
        for found, spec in flat
    ]


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a gradient of it can be asked for."""
    return tensor.is_floating_point() or tensor.is_complex()


class _Held:
    """What a node has until its backward is over."""

    def __init__(self, tensors: Sequence[Tensor], backward: Callable[[Gradients], Gradients]):
        self.tensors, self.backward = tensors, backward


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: _Held, anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in held.tensors)
        ctx.mark_non_differentiable(*(out for out in outputs if not is_differentiable(out)))
        ctx.backward_pass, held.tensors = held.backward, ()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.backward_pass is None:
            raise RuntimeError(
                "backward through a forward() a second time: what it saved is gone\n"
                "hint: backward(retain_graph=True) the first time"
            )
        host = [None if gradient is None else gradient.to("cpu") for gradient in gradients]
        given = ctx.backward_pass(host)
        if not _keeps_graph():
            ctx.backward_pass = None
        return (None, None, *given)


def _keeps_graph() -> bool:
    """Whether the backward under way was asked to keep its graph; torch 2.13 has no public word."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None else False
