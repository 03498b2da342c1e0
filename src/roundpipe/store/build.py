"""Moves a model into the host store: who owns which tensor, and what cannot be moved.

Names decide: a tensor that several layers read has the same full name in each. Two *different*
names whose parameters share memory would come apart when each gets a place of its own, so such a
model is refused.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.store.layer import HostLayer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from torch import Tensor


def build_store(
    layer_tensors: Sequence[Mapping[str, Tensor]],
    *,
    names: Sequence[str] | None = None,
    trainable: Set[str] | None = None,
    optim_dtype: torch.dtype | None = None,
) -> list[HostLayer]:
    """Move every layer's tensors into a segment of its own and return the layers in order.

    The first layer that reads a tensor owns it, later ones borrow it. ``trainable``: names, by
    default those that require grad. Raises ModelError, before anything is moved, for a tensor that
    cannot be.
    """
    _refuse_unmovable({name: t for tensors in layer_tensors for name, t in tensors.items()})
    owners: dict[str, HostLayer] = {}
    layers: list[HostLayer] = []
    for index, tensors in enumerate(layer_tensors):
        for name in tensors:
            same = name not in owners or owners[name].tensors[name] is tensors[name]
            assert same, f"two tensors of one name: {name}"
        own = {name: tensor for name, tensor in tensors.items() if name not in owners}
        trained = {n for n, t in own.items() if t.requires_grad} if trainable is None else trainable
        layer = HostLayer(
            index,
            names[index] if names is not None else str(index),
            own,
            trainable=trained,
            optim_dtype=optim_dtype,
            borrowed=[(owners[name], name) for name in tensors if name in owners],
        )
        owners.update(dict.fromkeys(own, layer))
        layers.append(layer)
    return layers


def relayout(layers: Sequence[HostLayer]) -> bool:
    """Follow what the user's parameters now say in ``requires_grad``; whether anything changed.

    To be called when no step is in flight. Layers without a change are not copied.
    """
    changed = [
        layer.relayout({n for n, tensor in layer.tensors.items() if tensor.requires_grad})
        for layer in layers
    ]
    return any(changed)


def newest_state(
    model: nn.Module, layers: Sequence[HostLayer], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``model.state_dict(...)`` with the newest value of every trained parameter, copied.

    Names that share a parameter share the copy. Blocks on nothing: nothing may be under way.
    """
    state: dict[str, Any] = model.state_dict(*args, **kwargs)
    prefix = kwargs.get("prefix", "")
    newest = {
        layer.tensors[name]: layer.newest(name).detach().clone()
        for layer in layers
        for name in layer.trainable
    }
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if prefix + name in state and tensor in newest:
            state[prefix + name] = newest[tensor]
    return state


def _refuse_unmovable(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"a tensor has no data: {name}\nhint: load the weights first")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).split(".")[-1]
            raise ModelError(f"a tensor is not dense: {name} ({kind})\nhint: make it dense first")
    parameters = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.numel()}
    spans = sorted((*_span(t), name) for name, t in parameters.items())
    for (_, end, before), (start, _, name) in pairwise(spans):
        if start < end:
            raise ModelError(
                f"two parameters share memory: {before} and {name}\n"
                "hint: tie them by making both attributes one nn.Parameter, or separate them with "
                "parameter.data = parameter.data.clone()"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that the tensor covers."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
