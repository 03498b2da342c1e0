"""One run of one layer for one microbatch, such that its recompute repeats it.

What could differ between two runs of a layer on the same input, and what is done about it::

    random draws      a generator of this layer's own          roundpipe.engine.random
    choices by value  noted in forward, replayed in recompute  roundpipe.engine.choices
    changing buffers  as they were before this forward         roundpipe.engine.state
    what users save   handed from forward to recompute         roundpipe.engine.recompute
    its input         copied for a layer that writes to it     roundpipe.engine.in_place

Most layers need none of it, and then it costs next to nothing: the first run of each is watched,
and says what the others need. If a layer is found to need more later (a branch that draws, a buffer
that changes only now), it is run again: a layer is a function of what it is given.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.engine.choices import Noting, Replaying
from roundpipe.engine.gates import Innermost
from roundpipe.engine.in_place import run_unspoilt
from roundpipe.engine.modes import Modes
from roundpipe.engine.random import DrawsFrom, Undrawn, layer_seed
from roundpipe.engine.recompute import Repeating, Saving, running

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.in_place import Given
    from roundpipe.engine.run import Run
    from roundpipe.engine.state import BufferState
    from roundpipe.models.spec import Boundary, Shell
    from roundpipe.plan.schedule import Visit

Kept = dict[str, Any]
"""What a forward keeps for its recompute: a pytree, empty for most layers."""


class Role(enum.Enum):
    """What a run of a layer is for."""

    ONCE = "once"  # nothing runs it again: a pass without gradient, or with loss and backward
    FORWARD = "forward"  # it will be recomputed
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Needs:
    """What the runs of a layer need. ``chooses_in``: modules, see `roundpipe.engine.gates`."""

    draws: bool = False
    chooses_in: frozenset[int] = frozenset()
    writes: bool = False  # to its input


_NOTHING = Needs()  # the same one for all layers that need nothing


class Known:
    """What layers need, found while their first run is watched; shared by all devices."""

    def __init__(self) -> None:
        self._needs: dict[int, Needs] = {}

    def forget(self) -> None:
        """Look again: the model went to training or evaluation mode."""
        self._needs.clear()

    def of(self, layer: int) -> Needs | None:
        """What a layer needs; None before its first run."""
        return self._needs.get(layer)

    def learn(
        self, layer: int, *, draws: bool, chooses_in: Iterable[int] = (), writes: bool = False
    ) -> None:
        """A run of a layer was seen to need this."""
        known = self._needs.get(layer, Needs())
        places = known.chooses_in.union(chooses_in)
        needs = Needs(known.draws or draws, places, known.writes or writes)
        self._needs[layer] = _NOTHING if needs == _NOTHING else needs


class _Again(enum.Enum):
    """Why a layer has to be run once more."""

    BUFFERS = "a buffer began to change"
    DRAWS = "it, or someone else meanwhile, drew from the default generator"


@dataclass(frozen=True)
class Task:
    """One run to be made: of which layer, for which microbatch, and for what."""

    run: Run
    visit: Visit
    layer: int
    microbatch: int
    role: Role
    kept: Kept = field(default_factory=dict)  # of its forward, where this is the recompute


class LayerRuns:
    """Runs the layers of one device. ``known`` and ``state`` are shared by all."""

    def __init__(self, model: DeviceModel, known: Known, state: BufferState) -> None:
        self._model, self._known, self._state = model, known, state
        self._device = model.device.torch_device

    def __call__(self, task: Task, given: Given) -> tuple[Boundary, Kept]:
        """What the layer returns, and what its recompute needs to know of this run."""
        shell = self._model.shell(task.layer)
        draws = False
        if self._known.of(task.layer) is _NOTHING and not task.kept:
            plain = self._plainly(task, shell, given)
            if not isinstance(plain, _Again):
                return plain
            draws = plain is _Again.DRAWS
        made = self._attempt(task, shell, given, draws=draws)
        while isinstance(made, _Again):
            draws = draws or made is _Again.DRAWS
            made = self._attempt(task, shell, given, draws=draws)
        return made

    def _plainly(self, task: Task, shell: Shell, given: Given) -> tuple[Boundary, Kept] | _Again:
        """The short way for a layer that is known to need nothing: most runs there are."""
        if shell.changing or self._state.names(task.layer):
            return _Again.BUFFERS
        undrawn, scope = Undrawn(self._device), _scope(task)
        with running(scope):
            boundary, _ = run_unspoilt(shell.run, given, writes=False)
        if shell.changed():
            return _Again.BUFFERS
        if undrawn.has_drawn():
            return _Again.DRAWS
        if isinstance(scope, Saving) and scope.saved:
            return boundary, self._kept(task, Modes(), (), scope)
        return boundary, {}

    def _attempt(
        self, task: Task, shell: Shell, given: Given, *, draws: bool
    ) -> tuple[Boundary, Kept] | _Again:
        """Run the layer, or say what it turned out to need and did not have.

        ``draws``: in this run draws are to be its own, whatever is known.
        """
        needs = self._known.of(task.layer)
        modes = self._modes(task, shell, needs, draws=draws)
        undrawn = None if modes.is_whole else Undrawn(self._device)
        names = shell.changing | self._state.names(task.layer)
        begun = self._begin_buffers(task, shell, names if needs else shell.buffers)
        scope = _scope(task)
        writes = None if needs is None else needs.writes
        with running(scope), modes.on():
            boundary, writes = run_unspoilt(shell.run, given, writes=writes)
        changed = self._changed(shell, begun, by_value=needs is None)
        if stray := changed - begun.keys():
            self._start_from_host(task, shell, stray)
            return _Again.BUFFERS
        if undrawn is not None and undrawn.has_drawn():
            shell.hang(begun)
            return _Again.DRAWS
        has_drawn, places = modes.end()
        if needs is not None:
            if has_drawn and modes.is_whole:
                self._known.learn(task.layer, draws=True)
        elif task.role is not Role.RECOMPUTE:  # which does not look for choices
            self._known.learn(task.layer, draws=has_drawn, chooses_in=places, writes=writes)
        kept = self._kept(task, modes, places, scope)
        buffers = self._end_buffers(task, shell, begun, changed | names)
        if buffers:
            kept["buffers"] = buffers
        return boundary, kept

    def _modes(self, task: Task, shell: Shell, needs: Needs | None, *, draws: bool) -> Modes:
        """What the layer runs under; nothing for one that is known to need nothing."""
        choices: Noting | Replaying | None = None
        places: frozenset[int] = frozenset()
        watch = Innermost(shell.module) if needs is None else None
        if task.role is Role.RECOMPUTE:
            noted = task.kept.get("choices")
            watch = None
            if noted is not None:
                choices, places = Replaying(noted["notes"]), frozenset(noted["places"])
        elif watch is not None:
            choices = Noting(watch.note)
        elif task.role is Role.FORWARD and needs is not None and needs.chooses_in:
            choices, places = Noting(), needs.chooses_in
        draws = draws or needs is None or needs.draws
        if choices is None and not draws:
            return Modes()
        call = task.run.call
        seed = layer_seed(call.seed, call.step, task.layer, task.microbatch)
        mode = DrawsFrom(seed, self._device)
        gates = self._model.gates_of(task.layer) if places else None
        return Modes(mode, choices, places, gates, watch, draws)

    def _kept(
        self, task: Task, modes: Modes, places: Iterable[int], scope: Saving | Repeating | None
    ) -> Kept:
        """What the recompute of a run needs, buffers apart."""
        if task.role is not Role.FORWARD:
            return {}
        assert isinstance(scope, Saving)
        if scope.saved:  # it repeats its choices itself
            scope.end()
            return {"saved": pytree.tree_map_only(torch.Tensor, self._own, scope.saved)}
        notes = modes.choices.notes if isinstance(modes.choices, Noting) else []
        return {"choices": {"notes": notes, "places": sorted(places)}} if notes else {}

    # ---- buffers

    def _begin_buffers(self, task: Task, shell: Shell, names: Iterable[str]) -> dict[str, Tensor]:
        """Hang copies of those buffers that the run may write to; what they are copies of."""
        if not names:
            return {}
        now = {**shell.buffers, **task.kept.get("buffers", {})}
        begun = {name: now[name] for name in names}
        shell.hang({name: value.clone() for name, value in begun.items()})
        return begun

    def _changed(self, shell: Shell, begun: dict[str, Tensor], *, by_value: bool) -> set[str]:
        changed = set(shell.changed())
        if by_value and begun:
            values = shell.buffers
            changed |= {name for name in begun if not _same_bits(begun[name], values[name])}
        return changed

    def _start_from_host(self, task: Task, shell: Shell, names: Iterable[str]) -> None:
        """Buffers are written to for the first time: until now they were as on the host."""
        self._state.found(task.layer, names)
        values = self._state.on_host(task.layer, names)
        begun = task.run.kept.begun.setdefault(task.layer, {})
        begun |= {name: value.clone() for name, value in values.items()}
        shell.hang({name: value.to(self._device) for name, value in values.items()})

    def _end_buffers(
        self, task: Task, shell: Shell, begun: dict[str, Tensor], changing: set[str]
    ) -> dict[str, Tensor]:
        """Leave what the run made of its buffers for the next one; return what it began with."""
        if task.role is Role.RECOMPUTE:
            shell.hang(begun)
            return {}
        shell.hang({name: value for name, value in begun.items() if name not in changing})
        if not changing:
            return {}
        self._state.found(task.layer, changing)
        self._state.require_in_order(task.visit, task.run.program.schedule, task.layer)
        values = shell.buffers
        self._state.leave(task.layer, {name: values[name] for name in changing})
        if task.role is not Role.FORWARD:
            return {}
        return {name: self._own(begun[name]) for name in changing}

    def _own(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that is not the slot's, which others will be uploaded to."""
        slots = self._model.weights.buffer
        place = tensor.untyped_storage().data_ptr()
        is_slot = slots is not None and place == slots.untyped_storage().data_ptr()
        return tensor.clone() if is_slot else tensor


def _scope(task: Task) -> Saving | Repeating | None:
    if task.role is Role.FORWARD:
        return Saving()
    if task.role is Role.RECOMPUTE:
        return Repeating(task.kept.get("saved", []))
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
