"""Play schedules in virtual time on ideal in-order streams.

With in-order streams and fixed durations the time at which an action starts is a longest path, so
no event queue is needed. Links are not shared here: a transfer takes its time whatever else moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.clocks import play
from roundpipe.plan.schedule import Schedule
from roundpipe.plan.timeline import Span, busy_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.costs import Costs


def simulate(
    steps: Schedule | Sequence[Schedule],
    seconds: Callable[[Action], float],
    *,
    delay: Callable[[Action, Action], float] | None = None,
) -> list[Span]:
    """Return when each action runs if every stream starts its head as soon as it may.

    ``steps`` is one step, or steps that follow each other without a flush: a wait with a minus is
    for the step before, and is over at once in the first. ``delay(made, user)`` is how long a result is on its way to
    another device. Spans come step by step. Raises
    DeadlockError when no stream can move.
    """
    chain = [steps] if isinstance(steps, Schedule) else steps
    spans: list[Span] = []
    free: dict[str, float] = {}
    earlier: dict[Action, float] = {}
    for schedule in chain:
        home = {action: name for name, action in schedule.actions()}
        ends: dict[Action, float] = {}
        for action, start, end in play(
            schedule.streams, schedule.waits, seconds, free=free, earlier=earlier, delay=delay
        ):
            spans.append(Span(home[action], action, start, end))
            ends[action] = end
            free[home[action]] = end
        earlier = ends
    return spans


def makespan(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end; 0 without spans."""
    if not spans:
        return 0.0
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """Idle share of the devices that compute, between their first start and their last end."""
    shares = busy_share(spans).values()
    return 1 - sum(shares) / len(shares) if shares else 0.0


def compute_seconds(schedule: Schedule, costs: Costs) -> Callable[[Action], float]:
    """Durations by the costs of a visit's layers: transfers and what the host does take none."""
    forward, backward = [], []
    for visit in schedule.visits:
        layers = [costs.layers[layer] for layer in visit.layers]
        forward.append(sum(layer.forward_seconds for layer in layers))
        backward.append(sum(layer.backward_seconds for layer in layers))

    def seconds(action: Action) -> float:
        if action.op in (Op.FORWARD, Op.RECOMPUTE):
            return forward[action.index]
        if action.op is Op.BACKWARD:
            return backward[action.index]
        return forward[action.index] + backward[action.index] if action.op is Op.FUSED else 0.0

    return seconds
