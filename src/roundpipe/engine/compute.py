"""The actions that compute: forward, fused, recompute, backward, as what a compute stream runs.

Boundaries are pytrees. Where a gradient is wanted, their floating tensors become leaves; the
gradient of a boundary is the list of those leaves' gradients, None where nothing came.

[Note: autograd's threads] ``backward`` runs in the thread that calls it. With autograd's own
threads two workers on one card would share one, and a node of ours that blocks it would deadlock.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.engine.caller import AUTOCAST_DEVICES
from roundpipe.engine.layer_run import Known, LayerRuns, Role, Task
from roundpipe.engine.random import NoDraws
from roundpipe.engine.weigh import Scale
from roundpipe.plan.actions import Action, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.layer_run import Kept
    from roundpipe.engine.run import Run
    from roundpipe.engine.state import BufferState
    from roundpipe.models.spec import Boundary, Inputs
    from roundpipe.plan.schedule import Visit


@dataclass
class _Graph:
    """What recompute leaves for backward."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    layers: list[_LayerInput] = field(default_factory=list)  # recompute by layer


@dataclass
class _LayerInput:
    """A layer's input, kept until its own recompute."""

    layer: int
    boundary: Boundary
    inputs: Inputs
    context: Any
    kept: Kept


def leaf_tree(boundary: Boundary, *, wants_gradient: bool) -> tuple[Boundary, list[Tensor]]:
    """The boundary cut from whatever made it, and its leaves that a gradient is wanted for."""
    leaves: list[Tensor] = []

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach()
        if wants_gradient and (fresh.is_floating_point() or fresh.is_complex()):
            leaves.append(fresh.requires_grad_())
        return fresh

    return pytree.tree_map(cut, boundary), leaves


def input_leaves(inputs: Inputs, wanted: Sequence[bool]) -> tuple[Inputs, list[Tensor]]:
    """The inputs with those leaves of their pytree cut that a gradient is wanted of."""
    flat, spec = pytree.tree_flatten((inputs.args, dict(inputs.kwargs or {})))
    leaves = []
    for place, is_wanted in enumerate(wanted):
        if is_wanted:
            flat[place] = flat[place].detach().requires_grad_()
            leaves.append(flat[place])
    args, kwargs = pytree.tree_unflatten(flat, spec)
    return replace(inputs, args=args, kwargs=kwargs), leaves


def differentiable(boundary: Boundary) -> list[Tensor]:
    """The tensors of a boundary that a gradient is wanted for by the layer above, in order."""
    return [
        leaf
        for leaf in pytree.tree_leaves(boundary)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


def _cut(
    run: Run, visit: Visit, boundary: Boundary, inputs: Inputs
) -> tuple[Boundary, Inputs, list[Tensor]]:
    """What a visit reads, and the leaves that the visit below, or the caller, wants a gradient of.

    Below the first layer that is what the caller gave.
    """
    if visit.layers.start == 0 and visit.gives_gradient and run.call.continues is not None:
        inputs, leaves = input_leaves(inputs, run.call.continues.wanted)
        return boundary, inputs, leaves
    boundary, leaves = leaf_tree(boundary, wants_gradient=visit.gives_gradient)
    return boundary, inputs, leaves


def _drop_logits(output: Any) -> None:
    """Take the logits out of a causal LM's output that has a loss: nobody asked for them."""
    if isinstance(output, MutableMapping) and isinstance(output.get("loss"), torch.Tensor):
        for name in output:
            if "logits" in name and isinstance(output[name], torch.Tensor):
                output[name] = None


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run autograd from ``outputs`` here, in this thread. See [Note: autograd's threads]."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if pairs:
        with torch.autograd.set_multithreading_enabled(False), _without_autocast():
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _without_autocast() -> ExitStack:
    """Autocast off: in backward it would cast also what forward computed in fp32 on purpose."""
    stack = ExitStack()
    for device in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextmanager
def _timed(run: Run, visit: Visit) -> Iterator[None]:
    """Count what runs inside as the backward of a visit."""
    begin = time.perf_counter()
    yield
    run.backward_seconds.setdefault(visit.number, []).append(time.perf_counter() - begin)


class Compute:
    """Runs the compute actions of one device. The devices of an engine share all but the model."""

    def __init__(self, model: DeviceModel, known: Known, state: BufferState) -> None:
        self.model = model
        self._runs, self._known = LayerRuns(model, known, state), known
        self._seen_backward: set[int] = set()  # layers that draw, but not in backward

    def run(self, run: Run, action: Action) -> None:
        """What the compute stream runs for ``action``."""
        visit = run.program.schedule.visits[action.index]
        assert action.microbatch is not None
        if action == visit.first:
            self._begin(run, visit)
        {
            Op.FORWARD: self._forward,
            Op.FUSED: self._fused,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
        }[action.op](run, visit, action.microbatch)

    def _poison_sums(self, run: Run, visit: Visit, microbatch: int) -> None:
        """Spoil the slot that a visit's first backward is about to fill; for tests."""
        if microbatch == visit.microbatches[0] and run.program.schedule.trains(visit):
            self.model.device.poison(self.model.sums_slot(visit, run.prints.sums[visit.number]))

    def _begin(self, run: Run, visit: Visit) -> None:
        self.model.enter(visit, run.prints.slot[visit.number])
        if run.program.schedule.trains(visit):
            lists = self.model.collect(visit, run.prints.sums[visit.number])
            for layer, names in lists.items():
                run.received[visit.number, layer] = names

    def _arrived(self, visit: Visit, microbatch: int) -> tuple[Boundary, Inputs, Any]:
        """What the visit starts from; a boundary that stayed here is taken from its maker."""
        boundary, inputs, label = self.model.arrived.pop((visit.number, microbatch))
        self.model.hold("compute", (boundary, inputs.args, inputs.kwargs, label))
        if boundary is None and visit.layers.start > 0:
            boundary = self.model.kept.pop((visit.layers.start, microbatch))
        return boundary, inputs, label

    @torch.no_grad()
    def _forward(self, run: Run, visit: Visit, microbatch: int) -> None:
        boundary, inputs, _ = self._arrived(visit, microbatch)
        context = self.model.context(inputs, visit.layers)
        key = (visit.number, microbatch)
        sends = run.program.schedule.sends[key]
        keeps = run.program.schedule.keeps.get(visit.number, ())
        leaving, kept = {}, {}
        scale = self._scale(run, visit, microbatch)
        for layer in visit.layers:
            role = Role.FORWARD if layer in keeps else Role.ONCE
            task = Task(run, visit, layer, microbatch, role)
            boundary, of_layer = self._layer(task, (boundary, inputs, context), scale)
            if of_layer:
                kept[layer] = of_layer
            if layer + 1 in sends:
                leaving[layer + 1] = boundary
        if run.program.num_layers in leaving and not run.call.wants_logits:
            _drop_logits(boundary)
        if key in run.program.kept:
            self.model.kept[visit.layers.stop, microbatch] = boundary
        if leaving:
            self.model.leaving[key] = leaving
        if kept:
            self.model.leaving_kept[key] = kept

    @torch.enable_grad()
    def _fused(self, run: Run, visit: Visit, microbatch: int) -> None:
        boundary, inputs, label = self._arrived(visit, microbatch)
        context = self.model.context(inputs, visit.layers)
        boundary, leaves = leaf_tree(boundary, wants_gradient=visit.gives_gradient)
        scale = self._scale(run, visit, microbatch)
        for layer in visit.layers:
            task = Task(run, visit, layer, microbatch, Role.ONCE)
            boundary, _ = self._layer(task, (boundary, inputs, context), scale)
        assert run.call.loss is not None
        self._poison_sums(run, visit, microbatch)
        with scale.layer(visit.layers[-1]) if scale else nullcontext():
            loss = run.call.loss(boundary, label, microbatch)
        scaled = run.call.loss_scale
        seed = torch.full_like(loss, 1.0 if scaled is None else scaled.read())
        with _timed(run, visit), self._drawing_nothing(visit.layers):
            backward([loss], [seed])
        kept = None
        if run.call.keep_outputs:
            kept, _ = leaf_tree(boundary, wants_gradient=False)
        self.model.leaving[visit.number, microbatch] = (loss.detach(), kept)
        self._give(run, visit, microbatch, leaves)

    def _recompute(self, run: Run, visit: Visit, microbatch: int) -> None:
        boundary, inputs, _ = self._arrived(visit, microbatch)
        context = self.model.context(inputs, visit.layers)
        key = (visit.number, microbatch)
        kept: dict[int, Kept] = self.model.arrived_kept.pop(key, {})
        self.model.hold("compute", kept)
        tasks = [
            Task(run, visit, layer, microbatch, Role.RECOMPUTE, kept.get(layer, {}))
            for layer in visit.layers
        ]
        if run.call.recompute_by_layer:
            inner = []
            with torch.no_grad():
                for task in tasks:
                    inner.append(_LayerInput(task.layer, boundary, inputs, context, task.kept))
                    if task is not tasks[-1]:  # the last runs once, with gradient
                        boundary, _ = self._layer(task, (boundary, inputs, context))
            self.model.graphs[key] = _Graph([], [], inner)
            return
        with torch.enable_grad():
            boundary, inputs, leaves = _cut(run, visit, boundary, inputs)
            scale = self._scale(run, visit, microbatch)
            for task in tasks:
                boundary, _ = self._layer(task, (boundary, inputs, context), scale)
        self.model.graphs[key] = _Graph(leaves, differentiable(boundary))

    def _backward(self, run: Run, visit: Visit, microbatch: int) -> None:
        key = (visit.number, microbatch)
        if key in run.program.schedule.resident_gradient:
            gradients = self.model.kept_gradients.pop((visit.layers.stop, microbatch))
        else:
            gradients = self.model.arrived_gradients.pop(key)
            self.model.hold("compute", gradients)
        graph = self.model.graphs.pop(key)
        self._poison_sums(run, visit, microbatch)
        if not run.call.recompute_by_layer:
            with _timed(run, visit), self._drawing_nothing(visit.layers):
                backward(graph.outputs, gradients)
            self._give(run, visit, microbatch, graph.leaves)
            return
        leaves: list[Tensor] = []
        while graph.layers:
            kept = graph.layers.pop()
            task = Task(run, visit, kept.layer, microbatch, Role.RECOMPUTE, kept.kept)
            with torch.enable_grad():
                inputs = kept.inputs
                if graph.layers:
                    boundary, leaves = leaf_tree(kept.boundary, wants_gradient=True)
                else:
                    boundary, inputs, leaves = _cut(run, visit, kept.boundary, inputs)
                out, _ = self._layer(task, (boundary, inputs, kept.context))
            with self._drawing_nothing(range(task.layer, task.layer + 1)):
                backward(differentiable(out), gradients)
            gradients = [leaf.grad for leaf in leaves]
        self._give(run, visit, microbatch, leaves)

    @contextmanager
    def _drawing_nothing(self, layers: range) -> Iterator[None]:
        """Watch the first backward of layers that draw: there nobody would repeat their draws."""
        drawing = {
            layer for layer in layers if (needs := self._known.of(layer)) and needs.draws
        } - self._seen_backward
        with NoDraws() if drawing else nullcontext():  # type: ignore[no-untyped-call]
            yield
        self._seen_backward |= drawing

    def _give(self, run: Run, visit: Visit, microbatch: int, leaves: list[Tensor]) -> None:
        """Hand the gradient of the visit's boundary to the visit below, here or elsewhere."""
        if not visit.gives_gradient:
            return
        key = (visit.number, microbatch)
        gradients = [leaf.grad for leaf in leaves]
        if key in run.program.schedule.keeps_gradient:
            self.model.kept_gradients[visit.layers.start, microbatch] = gradients
        elif Action(Op.GRADIENT_OUT, *key) in run.program.schedule.waits:
            self.model.leaving_gradients[key] = gradients

    def _scale(self, run: Run, visit: Visit, microbatch: int) -> Scale | None:
        """What weighs the first microbatch of each visit, if the run is to be weighed."""
        if run.sizes is None or microbatch != visit.microbatches[0]:
            return None
        return Scale(run.sizes, (self.model.weights.buffer, self.model.sums.buffer))

    def _layer(
        self, task: Task, given: tuple[Boundary, Inputs, Any], scale: Scale | None = None
    ) -> tuple[Boundary, Kept]:
        """Run one layer, timed and weighed: what it returns and what its recompute needs."""
        layer = task.layer
        weighed = scale.layer(layer, given[0]) if scale else nullcontext()
        begin = time.perf_counter()
        with weighed:
            made = self._runs(task, given)
        if scale:
            scale.note_work(layer, self.model.shell(layer).work_bytes)
        task.run.layer_seconds.setdefault(layer, []).append(time.perf_counter() - begin)
        return made
