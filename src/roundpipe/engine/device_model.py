"""A model on one device: shells, the memory they are bound to, what waits there for its next use.

[Note: slots] Two visits fit into the arena together: even turns lie at its bottom, odd turns at its
top. So the next visit is uploaded while this one computes, with no free list and no fragmentation.
Gradients have an arena of their own of the same kind; they leave later than the weights.

[Note: gradients add up in place] The first microbatch's gradient is copied into the arena as soon
as autograd has finished it and becomes the parameter's ``.grad``; autograd adds the others in
place, in fp32, in microbatch order. A parameter whose hook never ran got no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.device.emulated import EmulatedDevice
from roundpipe.engine.cuts import Cuts
from roundpipe.engine.gates import Gates
from roundpipe.engine.passing import PassingBlocks
from roundpipe.engine.staging import Staging
from roundpipe.engine.traffic import Traffic
from roundpipe.plan.schedule_memory import largest_pair
from roundpipe.store.packed import PackedTensor
from roundpipe.store.pages import HostPages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.device.api import Device
    from roundpipe.engine.program import Program
    from roundpipe.models.spec import ModelSpec, Shell
    from roundpipe.plan.schedule import Visit
    from roundpipe.store.layer import HostLayer


class Arena:
    """Device memory in which two consecutive visits lie, one at each end."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counted = 0
        self.buffer: Tensor | None = None

    def has_room(self, num_bytes: int, *, counts_as: int | None = None) -> bool:
        """Whether `fit` would leave it where it is."""
        counted = num_bytes if counts_as is None else counts_as
        is_large = self.buffer is not None and self.buffer.numel() >= num_bytes
        return is_large and self._counted >= counted

    def fit(self, num_bytes: int, *, counts_as: int | None = None) -> bool:
        """Have at least ``num_bytes``; return whether it moved. Nothing may be in flight.

        ``counts_as``: what they stand for on an emulated device.
        """
        counted = num_bytes if counts_as is None else counts_as
        if self.has_room(num_bytes, counts_as=counts_as):
            return False
        self.release()
        if isinstance(self._device, EmulatedDevice):
            self.buffer = self._device.allocate(num_bytes, counts_as=counted)
        else:
            self.buffer = self._device.allocate(num_bytes)
        self._counted = counted
        return True

    def place(self, num_bytes: int, turn: int) -> int:
        """Where a visit's bytes begin; ``turn`` is 0 or 1."""
        assert self.buffer is not None
        return 0 if turn == 0 else self.buffer.numel() - num_bytes

    def release(self) -> None:
        """Give the memory back."""
        if self.buffer is not None:
            self._device.free(self.buffer)
            self.buffer = None


def pair_bytes(program: Program, sizes: Mapping[int, int]) -> int:
    """Bytes for any two visits of ``sizes`` (by number) that follow each other on one device."""
    schedule = program.schedule
    turn = (schedule.next_start_device - schedule.start_device) % schedule.num_devices
    return largest_pair(schedule.visits, sizes, devices=schedule.num_devices, turn=turn)


def _declared_bytes(program: Program) -> tuple[int | None, int | None]:
    """What `pair_bytes` gives for weights and for sums by the costs that a program declares."""
    if program.costs is None:
        return None, None
    weights, sums = {}, {}
    for visit in program.schedule.visits:
        costs = program.costs.layers[visit.layers.start : visit.layers.stop]
        weights[visit.number] = sum(cost.weight_bytes for cost in costs)
        if program.schedule.trains(visit):
            sums[visit.number] = sum(cost.gradient_bytes for cost in costs)
    return pair_bytes(program, weights), pair_bytes(program, sums)


class DeviceModel:
    """See the module docstring. ``index`` is the device's number in schedules."""

    def __init__(
        self,
        device: Device,
        index: int,
        spec: ModelSpec,
        layers: Sequence[HostLayer],
        *,
        staging: Staging | None = None,
    ) -> None:
        self.device, self.index = device, index
        self.spec, self.layers = spec, layers
        self.context = spec.make_context(device.torch_device)
        self.weights, self.sums = Arena(device), Arena(device)
        self.cuts, self.traffic = Cuts(layers), Traffic()
        self.staging = staging or Staging(device, HostPages(), PassingBlocks(HostPages()))
        self.shells: dict[int, Shell] = {}
        self._gates: dict[int, Gates] = {}  # on the shells of some layers
        self.kept: dict[tuple[int, int], Any] = {}  # (boundary, microbatch) -> stays here
        self.kept_gradients: dict[tuple[int, int], Any] = {}
        self.arrived: dict[tuple[int, int], Any] = {}  # (visit, microbatch) -> came up
        self.arrived_gradients: dict[tuple[int, int], Any] = {}
        self.leaving: dict[tuple[int, int], Any] = {}  # (visit, microbatch) -> goes down
        self.leaving_gradients: dict[tuple[int, int], Any] = {}
        self.leaving_kept: dict[tuple[int, int], Any] = {}  # what forward keeps for recompute
        self.arrived_kept: dict[tuple[int, int], Any] = {}
        self.graphs: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor | PackedTensor]] = {}
        self._sum_views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._collecting: dict[int, tuple[dict[str, Tensor], list[str]]] = {}

    def shell(self, layer: int) -> Shell:
        """The device's copy of a layer's module tree, made at its first use."""
        shell = self.shells.get(layer)
        if shell is None:
            shell = self.shells[layer] = self.spec.layers[layer].make_shell(
                self.device.torch_device
            )
            for name, parameter in shell.parameters.items():
                if parameter.requires_grad:
                    hook = self._collector(layer, name)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return shell

    def gates_of(self, layer: int) -> Gates:
        """The hooks on a layer's shell. They go when that goes, whose leaves are device memory."""
        gates = self._gates.get(layer)
        if gates is None:
            gates = self._gates[layer] = Gates(self.shell(layer).module)
        return gates

    def hold(self, stream: str, tree: Any) -> None:
        """Keep tensors that another stream made until ``stream`` has used them.

        Needed where a launch returns before its work has run; the CPU's closures hold their own.
        """
        if self.device.torch_device.type != "cpu":
            leaves = pytree.tree_leaves(tree)
            self.device.hold(stream, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))

    def sync_mode(self) -> None:
        """Take over the user's ``training`` flags. Nothing may be in flight that sees them."""
        self.context.sync_mode()
        for shell in self.shells.values():
            shell.sync_mode()

    def prepare(self, program: Program) -> None:
        """Make memory and shells for a program. Nothing may be in flight."""
        visits = program.schedule.visits
        weights = {visit.number: self.weight_bytes(visit.layers) for visit in visits}
        sums = {
            visit.number: self.sum_bytes(visit.layers)
            for visit in visits
            if program.schedule.trains(visit)
        }
        stands_for = _declared_bytes(program)
        needs = [
            (self.weights, pair_bytes(program, weights), stands_for[0]),
            (self.sums, pair_bytes(program, sums), stands_for[1]),
        ]
        if not all(arena.has_room(size, counts_as=counted) for arena, size, counted in needs):
            self.let_go()
        for arena, size, counted in needs:
            arena.fit(size, counts_as=counted)
        for visit in program.schedule.visits_on(self.index):
            for layer in visit.layers:
                self.shell(layer)

    def drop_in_flight(self) -> None:
        """Let go of whatever a step that failed has left. Nothing may be in flight."""
        for held in (
            self.kept,
            self.kept_gradients,
            self.arrived,
            self.arrived_gradients,
            self.leaving,
            self.leaving_gradients,
            self.leaving_kept,
            self.arrived_kept,
            self.graphs,
            self._collecting,
        ):
            held.clear()
        if isinstance(self.device, EmulatedDevice):
            self.device.forget_loads()

    def let_go(self) -> None:
        """Drop every view of the arenas: while one is left, their memory is not given back.

        Nothing may be in flight.
        """
        self._views.clear()
        self._sum_views.clear()
        self._collecting.clear()
        for layer, shell in self.shells.items():
            nothing = {
                each.name: torch.empty(0, dtype=each.dtype, device=self.device.torch_device)
                for each in self.layers[layer].slot_layout.slices
            }
            for name, parameter in shell.parameters.items():
                parameter.grad = None
                nothing[name] = parameter.detach().new_empty(0)
            shell.bind(nothing)

    def forget_shells(self) -> None:
        """Make shells anew at their next use: what is trained has changed."""
        self.shells.clear()
        self._gates.clear()
        self._views.clear()
        self._sum_views.clear()
        self.cuts.forget()

    def close(self) -> None:
        """Give all memory back."""
        self.drop_in_flight()
        self.forget_shells()
        self.weights.release()
        self.sums.release()

    def weight_bytes(self, layers: range) -> int:
        """What uploading ``layers`` moves."""
        return sum(self.layers[layer].slot_layout.num_bytes for layer in layers)

    def sum_bytes(self, layers: range) -> int:
        """What downloading the gradients of ``layers`` moves."""
        return sum(self.layers[layer].slot_gradient_layout.num_bytes for layer in layers)

    def slot(self, visit: Visit, turn: int) -> Tensor:
        """The bytes of a visit's weights on the device."""
        size = self.weight_bytes(visit.layers)
        assert self.weights.buffer is not None
        return self.weights.buffer.narrow(0, self.weights.place(size, turn), size)

    def sums_slot(self, visit: Visit, turn: int) -> Tensor:
        """The bytes of a visit's gradients on the device."""
        size = self.sum_bytes(visit.layers)
        assert self.sums.buffer is not None
        return self.sums.buffer.narrow(0, self.sums.place(size, turn), size)

    def enter(self, visit: Visit, turn: int) -> None:
        """Bind the shells of a visit to its slot."""
        at = self.weights.place(self.weight_bytes(visit.layers), turn)
        for layer in visit.layers:
            self.shell(layer).bind(self._view(layer, at))
            at += self.layers[layer].slot_layout.num_bytes

    def collect(self, visit: Visit, turn: int) -> dict[int, list[str]]:
        """Begin a visit's gradients; returns the lists that name what will have arrived."""
        at = self.sums.place(self.sum_bytes(visit.layers), turn)
        lists: dict[int, list[str]] = {}
        for layer in visit.layers:
            layout = self.layers[layer].slot_gradient_layout
            key = (layer, at)
            if key not in self._sum_views:
                assert self.sums.buffer is not None
                self._sum_views[key] = layout.view(self.sums.buffer, at=at)
            lists[layer] = []
            self._collecting[layer] = (self._sum_views[key], lists[layer])
            for parameter in self.shell(layer).parameters.values():
                parameter.grad = None
            at += layout.num_bytes
        return lists

    def _view(self, layer: int, at: int) -> dict[str, Tensor | PackedTensor]:
        key = (layer, at)
        if key not in self._views:
            assert self.weights.buffer is not None
            views = self.layers[layer].slot_layout.view(self.weights.buffer, at=at)
            packed = self.layers[layer].packed
            self._views[key] = {**views, **{n: PackedTensor(packed[n], views) for n in packed}}
        return self._views[key]

    def _collector(self, layer: int, name: str) -> Callable[[nn.Parameter], None]:
        """See [Note: gradients add up in place]."""

        def collect(parameter: nn.Parameter) -> None:
            views, received = self._collecting[layer]
            if parameter.grad is not None and parameter.grad is not views[name]:
                views[name].copy_(parameter.grad)
                parameter.grad = views[name]
                received.append(name)

        return collect
