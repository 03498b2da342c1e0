"""What is surely over when an action starts: vector clocks over a chain of steps.

Streams run in order and waits order streams. A clock tells, for each stream, how many of its
actions are surely complete. Steps follow each other on the same streams without a flush, so a step
is looked at together with the steps before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError
from roundpipe.plan.actions import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from roundpipe.plan.schedule import Schedule

Clock = dict[str, int]
Node = tuple[int, Action]  # step in the chain, action


@dataclass
class Clocks:
    """Feed it the actions of a chain in an order that respects waits."""

    done: dict[Node, Clock] = field(default_factory=dict)
    place: dict[Node, tuple[str, int]] = field(default_factory=dict)
    _streams: dict[str, Clock] = field(default_factory=dict)

    def before(self, name: str, waits: Iterable[Node]) -> Clock:
        """What is over when the next action of stream ``name`` starts, if it waits for ``waits``."""
        clock = dict(self._streams.get(name, {}))
        for node in waits:
            merge(clock, self.done.get(node, {}))
        return clock

    def add(self, node: Node, name: str, waits: Iterable[Node]) -> Clock:
        """Run ``node`` on stream ``name``; return what was over when it started."""
        clock = self.before(name, waits)
        after = dict(clock)
        after[name] = after.get(name, 0) + 1
        self._streams[name] = after
        self.done[node] = after
        self.place[node] = (name, after[name])
        return clock

    def covers(self, clock: Clock, node: Node) -> bool:
        """Whether ``node`` is over by ``clock``; what never ran is."""
        if node not in self.place:
            return True
        name, position = self.place[node]
        return clock.get(name, 0) >= position

    def essential(self, name: str, waits: Sequence[Node]) -> list[Node]:
        """``waits`` without those that the stream's own order or another wait implies."""
        kept = [node for node in dict.fromkeys(waits) if node in self.done]
        for node in list(kept):
            others = [other for other in kept if other != node]
            if self.covers(self.before(name, others), node):
                kept = others
        return kept


def merge(clock: Clock, other: Clock) -> None:
    """Take the later of both for every stream, in place."""
    for name, position in other.items():
        if clock.get(name, 0) < position:
            clock[name] = position


def node_of(step: int, action: Action) -> Node:
    """The node a wait names, seen from ``step``."""
    return (step - 1, action.of_this_step()) if action.before else (step, action)


def order_by_start(
    streams: Mapping[str, Sequence[Action]],
    waits: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
) -> tuple[Action, ...]:
    """All actions sorted by when they would start; every wait within the step is respected.

    In-order streams with fixed durations make starts a longest path. Raises DeadlockError when no
    stream can move.
    """
    starts = {action: when for action, when, _ in play(streams, waits, seconds)}
    rank = {action: number for number, action in enumerate(starts)}
    return tuple(sorted(starts, key=lambda action: (starts[action], rank[action])))


def play(
    streams: Mapping[str, Sequence[Action]],
    waits: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
) -> Iterator[tuple[Action, float, float]]:
    """Give (action, start, end) in an order that respects waits, each stream starting its head at once.

    Waits for actions of the step before count as over. Raises DeadlockError.
    """
    position = dict.fromkeys(streams, 0)
    free = dict.fromkeys(streams, 0.0)
    ends: dict[Action, float] = {}
    blocked: dict[Action, list[str]] = {}
    ready = deque(streams)
    while ready:
        name = ready.popleft()
        queue = streams[name]
        while position[name] < len(queue):
            action = queue[position[name]]
            here = [other for other in waits.get(action, ()) if not other.before]
            missing = next((other for other in here if other not in ends), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(name)
                break
            start = max([free[name], *(ends[other] for other in here)])
            ends[action] = free[name] = start + seconds(action)
            position[name] += 1
            ready.extend(blocked.pop(action, ()))
            yield action, start, ends[action]
    heads = {name: str(streams[name][at]) for name, at in position.items() if at < len(streams[name])}
    if heads:
        raise DeadlockError(f"no stream can move; heads: {heads}")


def run_chain(chain: Sequence[Schedule]) -> Iterator[tuple[int, str, Action, tuple[Node, ...]]]:
    """The actions of a chain of steps in one order that respects waits: step, stream, action, waits.

    All of a step comes before all of the next; that is one legal order among many.
    """
    for step, schedule in enumerate(chain):
        home = {action: name for name, action in schedule.actions()}
        for action in schedule.order:
            waits = tuple(node_of(step, other) for other in schedule.waits.get(action, ()))
            yield step, home[action], action, waits
