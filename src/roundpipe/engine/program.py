"""A schedule made ready to be issued: what each host thread does, in order, with which waits.

Worked out once per schedule and kept; nothing here changes while it runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from roundpipe.engine.loads import Loads
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Schedule, Visit

HOST = -1  # the worker and device that run what happens on the host


@dataclass(frozen=True, slots=True)
class Item:
    """One action as its worker sees it.

    ``waits`` are the other streams' actions to wait for; ``throttle`` is one of this device's whose
    completion the host awaits before it issues more, so that it never runs far ahead.
    """

    action: Action
    stream: str
    waits: tuple[Action, ...]
    throttle: Action | None = None


@dataclass(frozen=True)
class Program:
    """A schedule with the lists that its workers go through.

    ``costs`` and ``speeds`` (of each device, relative to the costs') say what its actions take
    where devices are emulated; without costs they take nothing there.
    """

    schedule: Schedule
    costs: Costs | None = None
    speeds: tuple[float, ...] = ()

    @cached_property
    def loads(self) -> Loads | None:
        """What each action takes on an emulated machine."""
        return None if self.costs is None else Loads(self, self.costs, self.speeds)

    @cached_property
    def during_call(self) -> dict[int, list[Item]]:
        """What each worker issues when a call starts: all but the updates."""
        return self._items(updates=False)

    @cached_property
    def at_step(self) -> list[Item]:
        """What the host's worker issues when the optimizer steps."""
        return self._items(updates=True).get(HOST, [])

    @cached_property
    def boundary_uses(self) -> dict[tuple[int, int], int]:
        """How many uploads read each (boundary, microbatch) on the host."""
        uses: Counter[tuple[int, int]] = Counter()
        for visit in self.schedule.visits:
            for microbatch in visit.microbatches:
                if self.takes_boundary(visit, microbatch):
                    uses[visit.layers.start, microbatch] += 1
                for boundary in visit.results:  # the caller takes them when all is over
                    uses[boundary, microbatch] += 1
        return dict(uses)

    @cached_property
    def kept(self) -> frozenset[tuple[int, int]]:
        """(visit, microbatch) whose last boundary stays on its device for the next visit."""
        readers = {
            (visit.layers.start, microbatch, visit.device)
            for visit in self.schedule.visits
            for microbatch in visit.microbatches
            if (visit.number, microbatch) in self.schedule.resident
        }
        return frozenset(
            (visit.number, microbatch)
            for visit in self.schedule.visits
            for microbatch in visit.microbatches
            if visit.phase is Phase.FORWARD
            and (visit.layers.stop, microbatch, visit.device) in readers
        )

    @cached_property
    def fused(self) -> list[Action]:
        """The actions that bring each microbatch's loss to the host, in microbatch order."""
        outs = [
            Action(Op.ACTIVATION_OUT, visit.number, microbatch)
            for visit in self.schedule.visits
            if visit.phase is Phase.FUSED or self.is_result(visit)
            for microbatch in visit.microbatches
        ]
        return sorted(outs, key=lambda action: action.microbatch or 0)

    def is_result(self, visit: Visit) -> bool:
        """Whether a forward visit hands out the model's output."""
        return visit.phase is Phase.FORWARD and visit.layers.stop == self.num_layers

    @cached_property
    def num_layers(self) -> int:
        """Layers of the whole chain."""
        return max(visit.layers.stop for visit in self.schedule.visits)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """The layers the optimizer updates, in the order of their updates."""
        queue = self.schedule.streams.get("host", ())
        return tuple(action.index for action in queue if action.op is Op.UPDATE)

    def takes_boundary(self, visit: Visit, microbatch: int) -> bool:
        """Whether the visit's boundary comes up from the host."""
        return visit.layers.start > 0 and (visit.number, microbatch) not in self.schedule.resident

    def _items(self, *, updates: bool) -> dict[int, list[Item]]:
        home = {action: name for name, action in self.schedule.actions()}
        items: dict[int, list[Item]] = {}
        throttles = self._throttles()
        for action in self.schedule.order:
            device, _, name = home[action].rpartition(".")
            if (name == "host") is updates:
                worker = int(device) if device else HOST
                items.setdefault(worker, []).append(
                    Item(action, name, self.schedule.waits.get(action, ()), throttles.get(action))
                )
        return items

    def _throttles(self) -> dict[Action, Action]:
        """First action of a visit -> last of the device's visit before the one before it."""
        found = {}
        for device in range(self.schedule.num_devices):
            visits = self.schedule.visits_on(device)
            for old, new in zip(visits, visits[2:], strict=False):
                found[new.first] = old.last
        return found
