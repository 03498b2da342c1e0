"""What is surely over when an action starts: vector clocks over a chain of steps.

Streams run in order and waits order streams. A clock tells, for each stream, how many of its
actions are surely complete. Steps follow each other on the same streams without a flush, so a step
is looked at together with the steps before it.

A clock that covers an action covers all that was over before it, so most waits cost one look.
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
        """What is over when the next action of stream ``name`` starts, if it waits for these."""
        clock = dict(self._streams.get(name, ()))
        for node in waits:
            if not self.covers(clock, node):
                merge(clock, self.done[node])
        return clock

    def add(self, node: Node, name: str, waits: Iterable[Node]) -> Clock:
        """Run ``node`` on stream ``name``; return what was over when it started."""
        clock = self.before(name, waits)
        after = dict(clock)
        position = after[name] = after.get(name, 0) + 1
        self._streams[name] = self.done[node] = after
        self.place[node] = (name, position)
        return clock

    def covers(self, clock: Clock, node: Node) -> bool:
        """Whether ``node`` is over by ``clock``; what never ran is."""
        place = self.place.get(node)
        return place is None or clock.get(place[0], 0) >= place[1]

    def essential(self, name: str, waits: Iterable[Node]) -> list[Node]:
        """``waits`` without those that the stream's own order or another wait implies."""
        own = self._streams.get(name, {})
        kept = [node for node in dict.fromkeys(waits) if not self.covers(own, node)]
        for node in tuple(kept):
            if any(self.covers(self.done[other], node) for other in kept if other is not node):
                kept.remove(node)
        return kept


def merge(clock: Clock, other: Clock) -> None:
    """Take the later of both for every stream, in place."""
    for name, position in other.items():
        if clock.get(name, 0) < position:
            clock[name] = position


def order_by_start(
    streams: Mapping[str, Sequence[Action]],
    waits: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
) -> tuple[Action, ...]:
    """All actions sorted by when they would start; every wait within the step is respected.

    Raises DeadlockError when no stream can move.
    """
    starts = {action: start for action, start, _ in play(streams, waits, seconds)}
    # Sorting is stable and `play` respects waits, so an action that takes no time stays in front
    # of one that waits for it.
    return tuple(sorted(starts, key=starts.__getitem__))


def play(
    streams: Mapping[str, Sequence[Action]],
    waits: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
) -> Iterator[tuple[Action, float, float]]:
    """Give (action, start, end) in an order that respects waits; heads of streams start at once.

    In-order streams with fixed durations make starts a longest path. A wait for the step before is
    over at once. Raises DeadlockError when no stream can move.
    """
    position = dict.fromkeys(streams, 0)
    now = dict.fromkeys(streams, 0.0)
    ends: dict[Action, float] = {}
    blocked: dict[Action, list[str]] = {}
    ready = deque(streams)
    while ready:
        name = ready.popleft()
        queue = streams[name]
        while position[name] < len(queue):
            action = queue[position[name]]
            start = now[name]
            missing = None
            for other in waits.get(action, ()):
                if other.before:
                    continue
                if other not in ends:
                    missing = other
                    break
                start = max(start, ends[other])
            if missing is not None:
                blocked.setdefault(missing, []).append(name)
                break
            ends[action] = now[name] = start + seconds(action)
            position[name] += 1
            ready.extend(blocked.pop(action, ()))
            yield action, start, ends[action]
    heads = {
        name: str(streams[name][at]) for name, at in position.items() if at < len(streams[name])
    }
    if heads:
        raise DeadlockError(f"no stream can move; heads: {heads}")


def run_chain(chain: Sequence[Schedule]) -> Iterator[tuple[int, str, Action, tuple[Node, ...]]]:
    """The actions of a chain of steps, with streams and waits, in one order that respects waits.

    All of a step comes before all of the next; that is one legal order among many.
    """
    for step, schedule in enumerate(chain):
        yield from run_step(step, schedule)


def run_step(step: int, schedule: Schedule) -> Iterator[tuple[int, str, Action, tuple[Node, ...]]]:
    """The same for one schedule, which is number ``step`` of its chain."""
    home = {action: name for name, action in schedule.actions()}
    for action in schedule.order:
        after = schedule.waits.get(action, ())
        waits = tuple(
            (step - 1, other.of_this_step()) if other.before else (step, other) for other in after
        )
        yield step, home[action], action, waits
