"""The actions that move things between the host and one device, as what a stream runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.engine.cuts import chunk_range
from roundpipe.models.spec import Inputs
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.partials import Partials
    from roundpipe.engine.run import Run
    from roundpipe.engine.staging import Staging
    from roundpipe.plan.schedule import Visit
    from roundpipe.store.layer import HostLayer


def upload_weights(run: Run, model: DeviceModel, action: Action) -> None:
    """``U``: copy one chunk of a visit's weights into its slot."""
    visit = run.program.schedule.visits[action.index]
    slot = model.slot(visit, run.prints.slot[visit.number])
    if action.chunk == 0:
        model.device.poison(slot)
    assert action.chunk is not None
    count = run.program.schedule.chunks[action.op, action.index]
    cuts, moved = model.cuts.of(visit.layers, action.chunk, count), 0
    for cut in cuts:
        num_bytes = cut.source.numel()
        model.staging.up(slot.narrow(0, cut.at, num_bytes), cut.source)
        if cut.piece.let_go is not None:
            cut.piece.let_go(cut.begin, cut.begin + num_bytes)
        moved += num_bytes
    model.traffic.add(action.op, moved, len(cuts))
    if run.call.newest:
        start, limits = 0, _chunk_of(run, action, slot.numel())
        for layer in (model.layers[layer] for layer in visit.layers):
            _upload_newest(layer, slot, start, limits)
            start += layer.slot_layout.num_bytes


def _upload_newest(layer: HostLayer, slot: Tensor, start: int, limits: tuple[int, int]) -> None:
    """Write masters that are not published yet over the working weights of one chunk.

    A tensor belongs to the chunk that holds its last byte: what is written over it has been copied.
    """
    views = layer.slot_layout.view(slot, at=start)
    owners = {
        **dict.fromkeys(layer.trainable, layer),
        **{name: owner for owner, name in layer.borrowed if name in owner.trainable},
    }
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


def _up(model: DeviceModel, op: Op, tree: Any) -> Any:
    """A copy of a tree's tensors on the device, counted; true copies on the CPU too."""
    if tree is None:
        return None
    sizes: list[int] = []
    moved = model.staging.bring_up(tree, sizes)
    model.traffic.add(op, sum(sizes), len(sizes))
    return moved


def _down(model: DeviceModel, op: Op, tree: Any) -> Any:
    """A copy of a tree's tensors on the host, counted."""
    if tree is None:
        return None
    sizes: list[int] = []
    moved = model.staging.bring_down(tree, sizes)
    model.traffic.add(op, sum(sizes), len(sizes))
    return moved


def activation_in(run: Run, model: DeviceModel, action: Action) -> None:
    """``A``: bring up what a visit needs of one microbatch: boundary, inputs, label."""
    visit, microbatch = _of(run, action)
    boundary = None
    if run.program.takes_boundary(visit, microbatch):
        boundary = run.boundaries.take(visit.layers.start, microbatch)
        boundary = _up(model, action.op, boundary)
    piece = run.call.microbatches[microbatch]
    inputs = Inputs()
    if any(model.spec.needs_inputs(layer) for layer in visit.layers):
        given = (piece.inputs.args, piece.inputs.kwargs)
        args, kwargs = _up(model, action.op, given)
        inputs = Inputs(args, kwargs, wants_logits=run.call.wants_logits)
    is_last = visit.layers.stop == run.program.num_layers
    label = _up(model, action.op, piece.label) if is_last else None
    model.arrived[visit.number, microbatch] = (boundary, inputs, label)
    if visit.phase is Phase.BACKWARD:
        kept = run.kept.take(visit.layers, microbatch)
        if kept:
            model.arrived_kept[visit.number, microbatch] = _up(model, action.op, kept)


def gradient_in(run: Run, model: DeviceModel, action: Action) -> None:
    """``G``: bring up the gradient of the boundary above a visit."""
    visit, microbatch = _of(run, action)
    gradient = run.gradients.take(visit.layers.stop, microbatch)
    model.arrived_gradients[visit.number, microbatch] = _up(model, action.op, gradient)


def activation_out(run: Run, model: DeviceModel, action: Action) -> None:
    """``a``: bring down boundaries that other visits read, or a microbatch's loss and outputs."""
    visit, microbatch = _of(run, action)
    key = (visit.number, microbatch)
    leaving = model.leaving.pop(key, {})
    kept = model.leaving_kept.pop(key, None)
    model.hold("activations_down", (leaving, kept))
    if visit.has_backward:
        loss, outputs = leaving
        run.losses[microbatch] = _down(model, action.op, loss)
        run.outputs[microbatch] = _down(model, action.op, outputs)
        return
    for boundary, value in leaving.items():
        if boundary == run.program.num_layers:
            run.outputs[microbatch] = _down(model, action.op, value)
        else:
            value = _down(model, action.op, value)  # noqa: PLW2901
            run.boundaries.put(boundary, microbatch, value)
    for layer, of_layer in (_down(model, action.op, kept) or {}).items():
        run.kept.put(layer, microbatch, of_layer)


def gradient_out(run: Run, model: DeviceModel, action: Action) -> None:
    """``g``: bring down the gradient of a visit's boundary."""
    visit, microbatch = _of(run, action)
    gradient = model.leaving_gradients.pop((visit.number, microbatch))
    model.hold("activations_down", gradient)
    gradient = _down(model, action.op, gradient)
    run.gradients.put(visit.layers.start, microbatch, gradient)


def download_gradients(run: Run, model: DeviceModel, action: Action, partials: Partials) -> None:
    """``O``: copy one chunk of a visit's gradients to the host.

    A layer with one backward visit in the step goes straight into its gradient segment, in the
    segment's dtype; others go in fp32 into ``partials``, to be merged there.
    """
    visit = run.program.schedule.visits[action.index]
    sums = model.sums_slot(visit, run.prints.sums[visit.number])
    low, high = _chunk_of(run, action, sums.numel())
    direct = run.program.schedule.owners[action]
    brought = partials.of(run.program.schedule, visit)
    if action.chunk == 0:
        _poison_host(run, model, visit, brought)
    start = 0
    for index in visit.layers:
        layer = model.layers[index]
        size = layer.slot_gradient_layout.num_bytes
        a, b = max(low - start, 0), min(high - start, size)
        if a < b:
            part = sums.narrow(0, start, size)
            if index in direct:
                num_bytes = _download_direct(model.staging, layer, part, a, b)
            else:
                num_bytes = b - a
                target = brought[index].narrow(0, a, b - a)
                model.staging.down(target, part.narrow(0, a, b - a))
            model.traffic.add(action.op, num_bytes)
        start += size
    if action.chunk == run.program.schedule.chunks[Op.DOWNLOAD, visit.number] - 1:
        for index in direct:
            model.layers[index].mark_received(run.received[visit.number, index])


def _poison_host(run: Run, model: DeviceModel, visit: Visit, brought: Mapping[int, Tensor]) -> None:
    """Spoil what a visit's gradients are about to be written over, for tests on the CPU."""
    if model.device.torch_device.type != "cpu":
        return
    direct = run.program.schedule.owners[Action(Op.DOWNLOAD, visit.number, chunk=0)]
    for index in visit.layers:
        if index in direct:
            model.device.poison(model.layers[index].gradients(partial_sums=False).buffer)
        elif index in brought:
            model.device.poison(brought[index])


def _download_direct(staging: Staging, layer: HostLayer, sums: Tensor, low: int, high: int) -> int:
    """Copy bytes ``low`` to ``high`` of a layer's sums into its gradients, cast if need be.

    Returns the bytes that crossed the link: a cast comes before it.
    """
    segment = layer.gradients(partial_sums=False)
    if segment.layout is not layer.gradient_layout(partial_sums=False):  # it holds sums already
        there = segment.buffer.narrow(0, low, high - low)
        staging.down(there, sums.narrow(0, low, high - low))
        return high - low
    num_bytes = 0
    for run in layer.gradient_runs:
        wide, narrow = run.cut(sums, segment.buffer, low, high)
        if wide.numel():
            staging.down(narrow, wide)
            num_bytes += narrow.nbytes
    return num_bytes


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
