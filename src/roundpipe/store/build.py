"""Moves a model into the host store: who owns which tensor, and what cannot be moved.

Names decide: a tensor that several layers read has the same full name in each. Two *different*
names whose parameters share memory would come apart when each gets a place of its own, so such a
model is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.store.four_bit import is_params4bit, move_into_base
from roundpipe.store.freed import FreedMemory
from roundpipe.store.layer import HostLayer
from roundpipe.store.packed import cannot_train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from torch import Tensor

    from roundpipe.store.frozen import Base
    from roundpipe.store.pages import HostPages


def build_store(
    layer_tensors: Sequence[Mapping[str, Tensor]],
    *,
    names: Sequence[str] | None = None,
    trainable: Set[str] | None = None,
    optim_dtype: torch.dtype | None = None,
    bases: list[Base] | None = None,
    pages: HostPages | None = None,
) -> list[HostLayer]:
    """Move every layer's tensors into a segment of its own and return the layers in order.

    The first layer that reads a tensor owns it, later ones borrow it. ``trainable``: names, by
    default those that require grad. ``bases``: where frozen tensors lie already and stay; they are
    taken out of the list as layers take theirs, so that what is copied out of one is released
    before the next is. ``pages``: page-locks segments, layer by layer. Raises ModelError, before
    anything is moved, for a tensor that cannot be.
    """
    every = {name: t for tensors in layer_tensors for name, t in tensors.items()}
    _refuse_unmovable(every)
    bases = [] if bases is None else bases
    _refuse_trained(every, bases, trainable)
    owners: dict[str, HostLayer] = {}
    layers: list[HostLayer] = []
    freed = FreedMemory()
    for index, tensors in enumerate(layer_tensors):
        for name in tensors:
            same = name not in owners or owners[name].tensors[name] is tensors[name]
            assert same, f"two tensors of one name: {name}"
        own = {name: tensor for name, tensor in tensors.items() if name not in owners}
        trained = {n for n, t in own.items() if t.requires_grad} if trainable is None else trainable
        base = _base_of(own, bases)
        if base is not None and base.let_go is not None:  # of what a trial run of the model read
            base.let_go(0, base.segment.layout.num_bytes)
        layer = HostLayer(
            index,
            names[index] if names is not None else str(index),
            own,
            trainable=trained,
            optim_dtype=optim_dtype,
            borrowed=[(owners[name], name) for name in tensors if name in owners],
            base=base,
            pages=pages,
        )
        owners.update(dict.fromkeys(own, layer))
        layers.append(layer)
        freed.add(layer.weights.layout.num_bytes)
    freed.give_back()
    return layers


def is_changed(layers: Sequence[HostLayer]) -> bool:
    """Whether the user's parameters say something else in ``requires_grad`` than they did."""
    return any(
        {n for n, t in layer.tensors.items() if t.requires_grad} != set(layer.trainable)
        for layer in layers
    )


def relayout(layers: Sequence[HostLayer]) -> bool:
    """Follow what the user's parameters now say in ``requires_grad``; whether anything changed.

    To be called when no step is in flight. Layers without a change are not copied. Raises
    ModelError, before anything changed, for weights in 4 bits that are to be trained.
    """
    wanted = [{n for n, t in layer.tensors.items() if t.requires_grad} for layer in layers]
    for layer, names in zip(layers, wanted, strict=True):
        layer.require_trainable(names)
    changed = [layer.relayout(names) for layer, names in zip(layers, wanted, strict=True)]
    return any(changed)


def newest_state(
    model: nn.Module, layers: Sequence[HostLayer], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``model.state_dict(...)`` with the newest value of every trained parameter, copied.

    Names that share a parameter share the copy. Weights in 4 bits come unpacked, so all of them
    need the memory of the whole model (`trained_state` leaves them out); those of bitsandbytes' own
    layers come in its own form, as views. Blocks on nothing: nothing may be under way.
    """
    state: dict[str, Any] = model.state_dict(*args, **kwargs)
    newest = trained_state(model, layers)
    unpacked = {
        layer.tensors[name]: layer.newest(name)
        for layer in layers
        for name in (layer.held.packed if layer.held is not None else ())
        if not is_params4bit(layer.tensors[name])
    }
    prefix = kwargs.get("prefix", "")
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if prefix + name in state and (name in newest or tensor in unpacked):
            state[prefix + name] = newest[name] if name in newest else unpacked[tensor]
    return state


def trained_state(model: nn.Module, layers: Sequence[HostLayer]) -> dict[str, Tensor]:
    """The newest value of every trained parameter, copied, by each of its names in ``model``.

    What adapters are saved from: nothing is unpacked. Blocks on nothing: nothing may be under way.
    """
    newest = {
        layer.tensors[name]: layer.newest(name).detach().clone()
        for layer in layers
        for name in layer.trainable
    }
    named = model.named_parameters(remove_duplicate=False)
    return {name: newest[tensor] for name, tensor in named if tensor in newest}


class NewestState(Mapping[str, Any]):
    """What `newest_state` holds, each tensor made when it is asked for: nothing is copied before.

    What it gives may be a view of live memory. To be read while nothing is under way.
    """

    def __init__(self, model: nn.Module, layers: Sequence[HostLayer]) -> None:
        self._state: dict[str, Any] = model.state_dict(keep_vars=True)
        self._owners = {
            id(layer.tensors[name]): (layer, name)
            for layer in layers
            for name in (*layer.trainable, *(layer.held.packed if layer.held is not None else ()))
        }

    def __getitem__(self, name: str) -> Any:
        tensor = self._state[name]
        if id(tensor) not in self._owners or is_params4bit(tensor):
            return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
        layer, own = self._owners[id(tensor)]
        return layer.newest(own).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def require_writable(
    model: nn.Module, layers: Sequence[HostLayer], state: Mapping[str, Any]
) -> None:
    """Raise ModelError if loading ``state`` would write to weights in 4 bits or in a mapped file.

    bitsandbytes' own state of such weights (``….weight.absmax``) is among what is refused.
    """
    fixed = {
        layer.tensors[name]
        for layer in layers
        if layer.held is not None
        for name in layer.held.names
        if name in layer.held.packed or layer.held.base.let_go is not None
    }
    for name, tensor in model.named_parameters(remove_duplicate=False) if fixed else ():
        if tensor in fixed and name in state:
            raise ModelError(
                f"weights in 4 bits or in a mapped file cannot be loaded into: {name}\n"
                "hint: load only what is trained, strict=False"
            )


def _base_of(own: Mapping[str, Tensor], bases: list[Base]) -> Base | None:
    """Take the base that holds tensors of a layer out of ``bases``; they belong to no other.

    Of two the one that holds more: a weight that another layer's base has (the table of a model
    whose head is tied to it, when the table itself is trained as a copy) is an ordinary one then.
    """
    packed = {name: tensor for name, tensor in own.items() if is_params4bit(tensor)}
    if packed:
        return move_into_base(packed)
    mine = {id(tensor) for tensor in own.values()}
    found = [b for b in bases if any(id(t) in mine for t in b.tensors.values())]
    found.sort(key=lambda base: sum(t.nbytes for t in base.tensors.values() if id(t) in mine))
    for base in found[:-1]:
        assert not base.packed, f"{len(found)} bases for one layer: {list(own)[:3]}"
    for base in found:
        if base is found[-1] or all(id(t) in mine for t in base.tensors.values()):
            bases.remove(base)
    return found[-1] if found else None


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


def _refuse_trained(
    tensors: Mapping[str, Tensor], bases: Sequence[Base], trainable: Set[str] | None
) -> None:
    packed = {id(base.tensors[entry]) for base in bases for entry in base.packed}
    for name, tensor in tensors.items():
        is_trained = tensor.requires_grad if trainable is None else name in trainable
        if is_trained and (is_params4bit(tensor) or id(tensor) in packed):
            raise cannot_train(name)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that the tensor covers."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
