"""A schedule: for every stream the actions it runs in order, and what each one waits for.

A *visit* is one run of one stage on one device over a set of microbatches. Visits are numbered in
dispatch order through the whole step, so stage 3 in round 2 is another visit than in round 1, and
a replicated stage is one visit per device. ``order`` is one order of all actions in which each
stands after all it waits for: hosts issue work in that order, so they never wait in a circle.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Phase(enum.Enum):
    """What a visit does with its layers."""

    FORWARD = "forward"  # without gradient
    FUSED = "fused"  # forward, loss, backward of the last layers
    BACKWARD = "backward"  # recompute and backward


@dataclass(frozen=True)
class Visit:
    """One run of one stage on one device.

    ``saves`` are the boundaries (a boundary is named by the layer that reads it) that a forward
    visit hands out: its own end (``layers.stop``), and the start of every backward stage that
    begins inside it, above its first layer. ``results`` are those of them that the caller gets.
    ``gives_gradient``: of a visit that runs backward, whether anything below it is trained.
    """

    number: int
    stage: int
    phase: Phase
    layers: range
    device: int
    microbatches: tuple[int, ...]
    saves: tuple[int, ...] = ()
    gives_gradient: bool = False  # whether anything below it is trained
    results: tuple[int, ...] = ()

    def compute(self, microbatch: int) -> tuple[Action, ...]:
        """What the visit runs for one microbatch, in order."""
        ops = {
            Phase.FORWARD: (Op.FORWARD,),
            Phase.FUSED: (Op.FUSED,),
            Phase.BACKWARD: (Op.RECOMPUTE, Op.BACKWARD),
        }[self.phase]
        return tuple(Action(op, self.number, microbatch) for op in ops)

    @property
    def first(self) -> Action:
        """Its first action on the compute stream."""
        return self.compute(self.microbatches[0])[0]

    @property
    def last(self) -> Action:
        """Its last action on the compute stream."""
        return self.compute(self.microbatches[-1])[-1]

    @property
    def has_backward(self) -> bool:
        """Whether it makes gradients."""
        return self.phase is not Phase.FORWARD


def stream(device: int, name: str) -> str:
    """The full name of a device's stream, e.g. ``0.compute``."""
    return f"{device}.{name}"


def num_places(schedule: Schedule) -> int:
    """Places on the host for partial sums: as many as devices have gradients in flight."""
    return 2 * schedule.num_devices


@dataclass(frozen=True)
class Schedule:
    """One step, or one pass: forward, or the backward of a pass before. See the module docstring.

    ``is_continued``: its forward ran as a pass of its own. Then the caller gives it the inputs of
    its stages and the gradient of the end.
    """

    visits: tuple[Visit, ...]
    streams: Mapping[str, tuple[Action, ...]]
    waits: Mapping[Action, tuple[Action, ...]]
    num_devices: int
    num_microbatches: int
    start_device: int = 0
    deals_on: bool = True  # whether the next step begins where this one ended
    staleness: int = 0
    is_continued: bool = False
    # Of forward visits, by number: the layers that are recomputed, here or in a later pass, and so
    # may keep something for it beside boundaries.
    keeps: Mapping[int, range] = field(default_factory=dict)
    # What passes add. Keys are (visit, microbatch) or an action.
    sends: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # to the host
    resident: frozenset[tuple[int, int]] = frozenset()  # its boundary is on the device already
    resident_gradient: frozenset[tuple[int, int]] = frozenset()  # so is the gradient it takes
    keeps_gradient: frozenset[tuple[int, int]] = frozenset()  # the gradient it gives stays there
    owners: Mapping[Action, tuple[int, ...]] = field(default_factory=dict)  # layers of U, O, M
    addends: Mapping[Action, tuple[int, ...]] = field(default_factory=dict)  # visits that M adds up
    chunks: Mapping[tuple[Op, int], int] = field(default_factory=dict)  # of U and O, by visit
    order: tuple[Action, ...] = ()

    @property
    def is_lowered(self) -> bool:
        """Whether it says how things get to the devices, or only what they compute."""
        return any(not name.endswith(".compute") for name in self.streams)

    def actions(self) -> Iterator[tuple[str, Action]]:
        """Every action with the stream it is on."""
        for name, queue in self.streams.items():
            for action in queue:
                yield name, action

    @property
    def next_start_device(self) -> int:
        """Where the deal goes on in the next step.

        Where this one did, if its devices are not alike or its stages live on them. So too if it
        leaves a device without a visit: then no device's last use of a buffer ever lies two steps
        back, where no wait could name it.
        """
        if not self.deals_on or len({visit.device for visit in self.visits}) < self.num_devices:
            return self.start_device
        return (self.visits[-1].device + 1) % self.num_devices

    @property
    def is_eager(self) -> bool:
        """Whether layers are updated without waiting for all norms: nothing commits as a whole."""
        ops = {action.op for action in self.streams.get("host", ())}
        return Op.UPDATE in ops and Op.NORM not in ops

    def trains(self, visit: Visit) -> bool:
        """Whether the visit makes gradients of parameters (known once gradients are lowered)."""
        return (Op.DOWNLOAD, visit.number) in self.chunks

    @cached_property
    def partial_places(self) -> dict[int, int]:
        """Where on the host each visit brings its partial sums, if it does; used in turn."""
        added = sorted(visit for visits in self.addends.values() for visit in visits)
        return {visit: rank % num_places(self) for rank, visit in enumerate(added)}

    def begun_sums(self, merge: Action) -> set[int]:
        """Those owners of a merge to whose sum another one of this step has added before."""
        begun: set[int] = set()
        for other in self.streams["sums"]:
            if other == merge:
                break
            begun.update(self.owners[other])
        return begun & set(self.owners[merge])

    def outs(self, visit: Visit, microbatch: int) -> tuple[Action, ...]:
        """What leaves the device after one microbatch of a visit (known once routed), in order."""
        key = (visit.number, microbatch)
        outs = []
        if visit.phase is Phase.FUSED or self.sends.get(key) or visit.number in self.keeps:
            outs.append(Action(Op.ACTIVATION_OUT, *key))
        if visit.has_backward and visit.gives_gradient and key not in self.keeps_gradient:
            outs.append(Action(Op.GRADIENT_OUT, *key))
        return tuple(outs)

    @cached_property
    def kept_for(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(backward visit, microbatch) -> the forward visits that keep something for it."""
        makers: dict[int, list[Visit]] = {}
        for visit in self.visits:
            if visit.number in self.keeps:
                for microbatch in visit.microbatches:
                    makers.setdefault(microbatch, []).append(visit)
        return {
            (visit.number, microbatch): tuple(
                maker.number
                for maker in makers.get(microbatch, ())
                if maker.layers.start < visit.layers.stop and visit.layers.start < maker.layers.stop
            )
            for visit in self.visits
            if visit.phase is Phase.BACKWARD
            for microbatch in visit.microbatches
        }

    def visits_on(self, device: int) -> list[Visit]:
        """The visits of one device in order."""
        return [visit for visit in self.visits if visit.device == device]

    def text(self) -> str:
        """One line a stream, each action with its waits: what golden files hold."""
        lines = []
        for name, queue in self.streams.items():
            words = []
            for action in queue:
                after = " ".join(str(other) for other in self.waits.get(action, ()))
                words.append(f"{action}({after})" if after else str(action))
            lines.append(f"{name}: {' '.join(words)}")
        return "\n".join(lines) + "\n"
