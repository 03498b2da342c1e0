"""The actions that move things between the host and one device, as what a stream runs.

[Note: chunks] A visit's weights are one run of bytes on the device; chunk k of n is the k-th of n
equal parts of it, rounded to 256 bytes, wherever tensors begin and end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.models.spec import Inputs
from roundpipe.plan.actions import Action, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.run import Run
    from roundpipe.plan.schedule import Visit
    from roundpipe.store.layer import HostLayer

_GRAIN = 256


def chunk_range(num_bytes: int, chunk: int, count: int) -> tuple[int, int]:
    """First byte and the byte after the last of one of ``count`` equal parts."""

    def cut(at: int) -> int:
        return num_bytes if at == count else num_bytes * at // count // _GRAIN * _GRAIN

    return cut(chunk), cut(chunk + 1)


def upload_weights(run: Run, model: DeviceModel, action: Action) -> None:
    """``U``: copy one chunk of a visit's weights into its slot."""
    visit = run.program.schedule.visits[action.index]
    slot = model.slot(visit, run.prints.slot[visit.number])
    if action.chunk == 0:
        model.device.poison(slot)
    low, high = _chunk_of(run, action, slot.numel())
    start = 0
    for layer in (model.layers[layer] for layer in visit.layers):
        for piece in layer.upload_pieces():
            begin, end = start + piece.offset, start + piece.offset + piece.num_bytes
            a, b = max(low, begin), min(high, end)
            if a < b:
                source = piece.source.narrow(0, a - begin, b - a)
                slot.narrow(0, a, b - a).copy_(source, non_blocking=True)
        if run.call.newest:
            _upload_newest(layer, slot, start, (low, high))
        start += layer.slot_layout.num_bytes


def _upload_newest(layer: HostLayer, slot: Tensor, start: int, limits: tuple[int, int]) -> None:
    """Write masters that are not published yet over the working weights of one chunk.

    A tensor belongs to the chunk that holds its last byte: what is written over it has been copied.
    """
    views = layer.slot_layout.view(slot, at=start)
    owners = {**dict.fromkeys(layer.trainable, layer), **{n: o for o, n in layer.borrowed}}
    for place in layer.slot_layout.slices:
        owner = owners.get(place.name)
        end = start + place.offset + place.num_bytes
        if owner is not None and limits[0] < end <= limits[1]:
            views[place.name].copy_(owner.newest(place.name))


def _chunk_of(run: Run, action: Action, num_bytes: int) -> tuple[int, int]:
    assert action.chunk is not None
    return chunk_range(
        num_bytes, action.chunk, run.program.schedule.chunks[action.op, action.index]
    )


def to_device(tree: Any, device: torch.device) -> Any:
    """A copy of a tree's tensors on ``device``; true copies on the CPU too."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_like(leaf, device=device).copy_(leaf, non_blocking=True)

    return pytree.tree_map(copy, tree)


def activation_in(run: Run, model: DeviceModel, action: Action) -> None:
    """``A``: bring up what a visit needs of one microbatch: boundary, inputs, label."""
    visit, microbatch = _of(run, action)
    device = model.device.torch_device
    boundary = None
    if run.program.takes_boundary(visit, microbatch):
        boundary = to_device(run.boundaries.take(visit.layers.start, microbatch), device)
    piece = run.call.microbatches[microbatch]
    inputs = Inputs()
    if any(model.spec.needs_inputs(layer) for layer in visit.layers):
        inputs = Inputs(*to_device((piece.inputs.args, piece.inputs.kwargs), device))
    is_last = visit.layers.stop == run.program.num_layers
    label = to_device(piece.label, device) if is_last else None
    model.arrived[visit.number, microbatch] = (boundary, inputs, label)


def gradient_in(run: Run, model: DeviceModel, action: Action) -> None:
    """``G``: bring up the gradient of the boundary above a visit."""
    visit, microbatch = _of(run, action)
    gradient = run.gradients.take(visit.layers.stop, microbatch)
    model.arrived_gradients[visit.number, microbatch] = to_device(
        gradient, model.device.torch_device
    )


def activation_out(run: Run, model: DeviceModel, action: Action) -> None:
    """``a``: bring down boundaries that other visits read, or a microbatch's loss and outputs."""
    visit, microbatch = _of(run, action)
    leaving = model.leaving.pop((visit.number, microbatch))
    model.hold("activations_down", leaving)
    host = torch.device("cpu")
    if visit.has_backward:
        loss, outputs = leaving
        run.losses[microbatch] = to_device(loss, host)
        run.outputs[microbatch] = to_device(outputs, host)
        return
    for boundary, value in leaving.items():
        if boundary == run.program.num_layers:
            run.outputs[microbatch] = to_device(value, host)
        else:
            run.boundaries.put(boundary, microbatch, to_device(value, host))


def gradient_out(run: Run, model: DeviceModel, action: Action) -> None:
    """``g``: bring down the gradient of a visit's boundary."""
    visit, microbatch = _of(run, action)
    gradient = model.leaving_gradients.pop((visit.number, microbatch))
    model.hold("activations_down", gradient)
    run.gradients.put(visit.layers.start, microbatch, to_device(gradient, torch.device("cpu")))


def download_gradients(
    run: Run, model: DeviceModel, action: Action, partials: dict[tuple[int, int], Tensor]
) -> None:
    """``O``: copy one chunk of a visit's gradients to the host.

    A layer with one backward visit in the step goes straight into its gradient segment, in the
    segment's dtype; others go in fp32 into ``partials[visit, layer]``, to be merged there.
    """
    visit = run.program.schedule.visits[action.index]
    sums = model.sums_slot(visit, run.prints.sums[visit.number])
    low, high = _chunk_of(run, action, sums.numel())
    direct = run.program.schedule.owners[action]
    if action.chunk == 0:
        _poison_host(run, model, visit, partials)
    start = 0
    for index in visit.layers:
        layer = model.layers[index]
        size = layer.slot_gradient_layout.num_bytes
        a, b = max(low - start, 0), min(high - start, size)
        if a < b:
            part = sums.narrow(0, start, size)
            if index in direct:
                _download_direct(layer, part, a, b)
            else:
                partials[visit.number, index].narrow(0, a, b - a).copy_(
                    part.narrow(0, a, b - a), non_blocking=True
                )
        start += size
    if action.chunk == run.program.schedule.chunks[Op.DOWNLOAD, visit.number] - 1:
        for index in direct:
            model.layers[index].mark_received(run.received[visit.number, index])


def _poison_host(
    run: Run, model: DeviceModel, visit: Visit, partials: dict[tuple[int, int], Tensor]
) -> None:
    """Spoil what a visit's gradients are about to be written over, for tests on the CPU."""
    if model.device.torch_device.type != "cpu":
        return
    direct = run.program.schedule.owners[Action(Op.DOWNLOAD, visit.number, chunk=0)]
    for index in visit.layers:
        if index in direct:
            model.device.poison(model.layers[index].gradients(partial_sums=False).buffer)
        else:
            model.device.poison(partials[visit.number, index])


def _download_direct(layer: HostLayer, sums: Tensor, low: int, high: int) -> None:
    """Copy bytes ``low`` to ``high`` of a layer's sums into its gradients, cast if need be."""
    segment = layer.gradients(partial_sums=False)
    if segment.layout == layer.slot_gradient_layout:
        segment.buffer.narrow(0, low, high - low).copy_(
            sums.narrow(0, low, high - low), non_blocking=True
        )
        return
    for name, view in layer.slot_gradient_layout.view(sums).items():
        if low <= layer.slot_gradient_layout.by_name[name].offset < high:
            segment.views[name].copy_(view, non_blocking=True)


def partial_layers(run: Run, visit: Visit) -> Iterator[int]:
    """The layers of a visit whose gradients are merged on the host."""
    direct = run.program.schedule.owners[Action(Op.DOWNLOAD, visit.number, chunk=0)]
    return (layer for layer in visit.layers if layer not in direct)


def _of(run: Run, action: Action) -> tuple[Visit, int]:
    assert action.microbatch is not None
    return run.program.schedule.visits[action.index], action.microbatch


TRANSFERS = {
    Op.UPLOAD: upload_weights,
    Op.ACTIVATION_IN: activation_in,
    Op.GRADIENT_IN: gradient_in,
    Op.ACTIVATION_OUT: activation_out,
    Op.GRADIENT_OUT: gradient_out,
}
