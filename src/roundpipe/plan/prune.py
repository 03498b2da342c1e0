"""Take away the waits that nothing needs: passes add every wait they know a reason for.

What stays is needed: without any single wait of it a rule of `check` fails. One is added: where a
chunk starts so late that its successor's gate is behind it, the successor gets a later gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Op
from roundpipe.plan.clocks import Clocks, run_step
from roundpipe.plan.footprint import Accesses, Footprints, Turns
from roundpipe.plan.roads import is_kept_apart, pairs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.clocks import Clock, Node
    from roundpipe.plan.roads import Pair
    from roundpipe.plan.schedule import Schedule


_GATES = (Op.ACTIVATION_IN, Op.ACTIVATION_OUT, Op.GRADIENT_OUT)  # what a chunk waits behind
_CHUNKED = (".weights", ".gradients")


def prune(chain: Sequence[Schedule]) -> list[Schedule]:
    """The chain, each step with only the waits it needs after those before it.

    Needed is what an access to a buffer must come after, and what keeps chunks apart; not what the
    order of streams or another needed wait implies.
    """
    clocks, accesses, turns, pruned = Clocks(), Accesses(), Turns(), []
    queues: dict[str, list[Node]] = {}
    for this, schedule in enumerate(chain):
        prints, roads = Footprints(schedule, turns), pairs(chain[: this + 1])
        turns = prints.turns_after
        for name, queue in schedule.streams.items():
            queues.setdefault(name, []).extend((this, action) for action in queue)
        kept: dict[Action, tuple[Action, ...]] = {}
        started: dict[Action, Clock] = {}
        for _, name, action, waits in run_step(this, schedule):
            before = accesses.before((this, action), prints.of(action))
            pair = roads.get(action)
            apart = None if pair is None else (pair, started[pair.before])
            if apart is not None and not is_kept_apart(*apart, clocks.before(name, waits)):
                waits = (*waits, *_later_gate(clocks, queues, *apart))  # noqa: PLW2901
            needed = _needed(clocks, name, waits, before, apart)
            started[action] = clocks.add((this, action), name, needed)
            kept[action] = tuple(
                other if owner == this else other.of_step_before() for owner, other in needed
            )
        pruned.append(replace(schedule, waits=kept))
    return pruned


def _later_gate(
    clocks: Clocks, queues: Mapping[str, Sequence[Node]], pair: Pair, started: Clock
) -> list[Node]:
    """The first activation that may still come when the chunk before starts, if it has run."""
    gate = queues[pair.road][started.get(pair.road, 0)]
    return [gate] if gate in clocks.place else []


def _needed(
    clocks: Clocks,
    name: str,
    waits: Sequence[Node],
    before: Collection[Node],
    apart: tuple[Pair, Clock] | None,
) -> list[Node]:
    """Those of ``waits`` that order the next action of a stream behind ``before``, or chunks.

    Only gates are weighed: any other wait was added for one access, and stays unless implied. It
    may seem needless after these few steps and not after others.
    """
    left = list(waits)
    gates = [wait for wait in waits if wait[1].op in _GATES and wait not in before]
    for gate in gates if name.endswith(_CHUNKED) else ():
        others = [other for other in left if other != gate]
        clock = clocks.before(name, others)
        if all(clocks.covers(clock, access) for access in before) and (
            apart is None or is_kept_apart(*apart, clock)
        ):
            left = others
    return clocks.essential(name, left)
