"""Play a chain of schedules: in-order streams, transfers that share roads, Python that is serial.

With in-order streams everything that waits is a graph: an action starts when the action before it
on its stream and all it waits for are over. What has a fixed length makes a longest path; transfers
share links and memory, so their ends move whenever another one starts or ends, and those are kept
in a small set beside the heap of events. Ties go by number: the same chain always plays the same.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError
from roundpipe.sim.flows import Flows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.schedule import Schedule
    from roundpipe.sim.sharing import Sharing
    from roundpipe.sim.work import Work

_START, _END, _ISSUED = 0, 1, 2


@dataclass
class Graph:
    """The actions of a chain as numbered nodes with edges, made once and played once."""

    actions: list[Action] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)  # how many edges come in
    users: list[list[tuple[int, float]]] = field(default_factory=list)  # (node, delay)
    behind: list[int] = field(default_factory=list)  # the next node of the stream, or -1


def graph(
    chain: Sequence[Schedule],
    work: Callable[[Schedule], Callable[[Action], Work]],
    delay: Callable[[Action, Action], float] | None = None,
) -> Graph:
    """Number the actions of ``chain``; waits for what no step holds are over at once."""
    out = Graph()
    earlier: dict[Action, int] = {}
    tails: dict[str, int] = {}
    for step, schedule in enumerate(chain):
        of = work(schedule)
        numbers: dict[Action, int] = {}
        for name, queue in schedule.streams.items():
            for action in queue:
                node = numbers[action] = len(out.actions)
                out.actions.append(action)
                out.streams.append(name)
                out.works.append(of(action))
                out.behind.append(-1)
                out.users.append([])
                tail = tails.get(name, -1)
                out.missing.append(int(tail >= 0))
                if tail >= 0:
                    out.behind[tail] = node
                tails[name] = node
        out.steps.extend([step] * len(numbers))
        for action, node in numbers.items():
            for other in schedule.waits.get(action, ()):
                source = (
                    earlier.get(other.of_this_step(), -1) if other.before else numbers.get(other)
                )
                if source is None:
                    raise DeadlockError(f"{action} waits for {other}, which no stream runs")
                if source >= 0:
                    late = delay(other, action) if delay else 0.0
                    out.users[source].append((node, late))
                    out.missing[node] += 1
        earlier = numbers
    return out


class Player:
    """Plays a graph once. Afterwards ``start``, ``end`` and ``cause`` hold a value for each node.

    ``cause`` is the node that was waited for last, or -1.
    """

    def __init__(self, nodes: Graph, sharing: Sharing | None = None) -> None:
        count = len(nodes.actions)
        self.nodes = nodes
        self.start = [math.nan] * count
        self.end = [math.nan] * count
        self.cause = [-1] * count
        self._missing = list(nodes.missing)
        self._ready = [0.0] * count
        self._heap: list[tuple[float, int, int]] = []  # time, node, what happens
        self._flows = Flows(sharing) if sharing is not None else None
        self._python_free = 0.0
        self._late_issue: dict[int, float] = {}

    def play(self) -> None:
        """Run everything. Raises DeadlockError if something waits for ever."""
        nodes, heap = self.nodes, self._heap
        for node, missing in enumerate(self._missing):
            if missing == 0:
                heapq.heappush(heap, (0.0, node, _START))
        while True:
            when, first = self._flows.first() if self._flows is not None else (math.inf, -1)
            if heap and heap[0][0] <= when:
                now, node, kind = heapq.heappop(heap)
                if kind == _START:
                    self._begin(node, now)
                elif kind == _ISSUED:
                    self._run(node, now)
                else:
                    self._finish(node, now)
            elif self._flows is not None and first >= 0:
                self._flows.end(first, when)
                self._finish(first, when)
            else:
                break
        stuck = [node for node, end in enumerate(self.end) if math.isnan(end)]
        if stuck:
            heads = {nodes.streams[node]: str(nodes.actions[node]) for node in reversed(stuck)}
            raise DeadlockError(f"no stream can move; heads: {heads}")

    def _begin(self, node: int, now: float) -> None:
        """What ``node`` waited for is over: Python issues it, unless it had the time already."""
        host = self.nodes.works[node].host_seconds
        if not host:
            self._run(node, now)
            return
        issued = self._late_issue.pop(node, None)
        if issued is None:
            issued = self._issue(node, now)
        if issued > now:
            heapq.heappush(self._heap, (issued, node, _ISSUED))
        else:
            self._run(node, now)

    def _issue(self, node: int, now: float) -> float:
        self._python_free = max(self._python_free, now) + self.nodes.works[node].host_seconds
        return self._python_free

    def _run(self, node: int, now: float) -> None:
        work = self.nodes.works[node]
        self.start[node] = now
        behind = self.nodes.behind[node]
        if behind >= 0 and self.nodes.works[behind].host_seconds:
            # A worker issues its next action while this one is under way.
            self._late_issue[behind] = self._issue(behind, now)
        if work.num_bytes and self._flows is not None:
            self._flows.start(node, work.num_bytes, work.road, now)
        else:
            heapq.heappush(self._heap, (now + work.seconds, node, _END))

    def _finish(self, node: int, now: float) -> None:
        self.end[node] = now
        users = self.nodes.users[node]
        behind = self.nodes.behind[node]
        if behind >= 0:
            self._arrive(behind, node, now)
        for user, late in users:
            self._arrive(user, node, now + late)

    def _arrive(self, user: int, source: int, when: float) -> None:
        if when >= self._ready[user]:
            self._ready[user] = when
            self.cause[user] = source
        self._missing[user] -= 1
        if not self._missing[user]:
            heapq.heappush(self._heap, (self._ready[user], user, _START))
