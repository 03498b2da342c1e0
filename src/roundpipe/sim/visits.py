"""Play a chain of steps visit by visit: what the search does some dozens of times.

The same machine and the same rules as ``simulate_machine`` has for an outlined schedule, in a small
part of the time. A visit runs its microbatches one behind the other, so once its weights are there
and the visits that feed it are known, all its times follow at once::

    end(j) = max(end(j-1) + R, arrival(j) + R, gradient(j)) + B

Only weights, gradients and updates are events. A visit waits as a whole for a slot for its
gradients, where action by action its first recompute need not. Python's time is not played: as long
as there is less of it than of compute it hides, and a step is never shorter than all of it.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError
from roundpipe.sim.flows import Flows
from roundpipe.sim.sharing import Sharing
from roundpipe.sim.visit_graph import Run, Steps, VisitGraph

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine
    from roundpipe.sim.work import Prices


class VisitPlayer:
    """Plays a chain of steps. ``step_ends``: for each when its last compute ends, once played."""

    def __init__(
        self, steps: Steps, prices: Prices, machine: Machine | None, *, hop_seconds: float = 0.0
    ) -> None:
        self._graph, self._hop = VisitGraph(steps, prices), hop_seconds
        self._flows = Flows(Sharing(machine)) if machine is not None else None
        self._nodes, self._runs = self._graph.nodes, self._graph.runs
        self._free = [0.0] * steps.devices
        self._made: dict[tuple[int, int, int], tuple[float, int]] = {}
        self._gradients: dict[tuple[int, int, int], tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._num_ended = 0
        self.step_ends = [0.0] * steps.num_steps
        self.moved_bytes = self._graph.moved_bytes

    def play(self) -> VisitPlayer:
        """Run everything. Raises DeadlockError if something waits for ever."""
        for number, node in enumerate(self._nodes):
            if not node.missing:
                heapq.heappush(self._heap, (0.0, number, 0))
        while True:
            when, flow = self._flows.first() if self._flows is not None else (math.inf, -1)
            if self._heap and self._heap[0][0] <= when:
                now, number, is_end = heapq.heappop(self._heap)
                if is_end:
                    self._end(number, now)
                else:
                    self._start(number, now)
            elif flow >= 0 and self._flows is not None:
                self._flows.end(flow, when)
                self._end(flow, when)
            else:
                break
        if self._num_ended < len(self._nodes):
            raise DeadlockError(f"{len(self._nodes) - self._num_ended} actions wait for ever")
        return self

    def _start(self, number: int, now: float) -> None:
        node = self._nodes[number]
        if node.visit >= 0:
            end = self._compute(self._runs[node.visit], now)
            heapq.heappush(self._heap, (end, number, 1))
            for follower in node.followers:
                self._arrive(follower, now)
        elif node.num_bytes and self._flows is not None:
            self._flows.start(number, node.num_bytes, node.road, now)
        else:
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        self._num_ended += 1
        for user in self._nodes[number].users:
            self._arrive(user, now)

    def _arrive(self, number: int, now: float) -> None:
        node = self._nodes[number]
        node.missing -= 1
        if not node.missing:
            heapq.heappush(self._heap, (now, number, 0))

    def _compute(self, run: Run, now: float) -> float:
        """All times of one visit, whose weights are there ``now``."""
        at = max(self._free[run.device], now)
        step, device, hop = run.step, run.device, self._hop
        for microbatch in run.share:
            if run.boundary:
                when, where = self._made[step, run.boundary, microbatch]
                at = max(at, when if where == device else when + hop)
            at += run.recompute
            if run.gradient >= 0:
                when, where = self._gradients[step, run.gradient, microbatch]
                at = max(at, when if where == device else when + hop)
            at += run.rest
            for boundary in run.saves:
                self._made[step, boundary, microbatch] = at, device
            if run.gives >= 0:
                self._gradients[step, run.gives, microbatch] = at, device
        self._free[device] = at
        self.step_ends[step] = max(self.step_ends[step], at)
        return at
