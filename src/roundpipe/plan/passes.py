"""Passes: lower a computation to a whole step. Each is a pure function from schedule to schedule.

::

    computation ── activations ── weights ── gradients ── updates ── order ── prune

A step follows the one before without a flush, so passes look at that one too: a slot that this
step fills first was used last in the step before. The passes add every wait they have a reason for;
pruning takes away those that others imply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.boundaries import add_activations
from roundpipe.plan.check import compute_is_grouped_by_visit
from roundpipe.plan.chunks import add_gradients, add_weights, chunk_layers
from roundpipe.plan.clocks import order_by_start
from roundpipe.plan.draft import MIN_CHUNK_BYTES, Options
from roundpipe.plan.generators import at_start_device
from roundpipe.plan.prune import prune
from roundpipe.plan.schedule import Phase, Schedule
from roundpipe.plan.updates import add_updates

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "MIN_CHUNK_BYTES",
    "PASSES",
    "Options",
    "add_activations",
    "add_gradients",
    "add_updates",
    "add_weights",
    "chunk_layers",
    "lower",
    "lower_chain",
    "outline",
    "prune",
    "set_order",
]

Pass = Callable[[Schedule, "Schedule | None", Options], Schedule]
PASSES: tuple[Pass, ...] = (add_activations, add_weights, add_gradients, add_updates)


def set_order(base: Schedule, options: Options) -> Schedule:
    """Give all actions one order in which hosts may issue them."""
    forward, backward = [], []
    for visit in base.visits:
        costs = [options.costs.layers[layer] for layer in visit.layers]
        forward.append(sum(cost.forward_seconds for cost in costs))
        backward.append(sum(cost.backward_seconds for cost in costs))

    def seconds(action: Action) -> float:
        seconds = 1e-9  # so that what waits comes later
        if action.op in COMPUTE and action.op is not Op.BACKWARD:
            seconds += forward[action.index]
        if action.op in (Op.FUSED, Op.BACKWARD):
            seconds += backward[action.index]
        return seconds

    return replace(base, order=order_by_start(base.streams, base.waits, seconds))


def outline(computation: Schedule, options: Options, *, steps: int = 3) -> list[Schedule]:
    """The chain that ``lower_chain`` gives, without what moves activations: for playing only.

    Weights and gradients go in one piece, nothing is pruned and no order of issue is set, so it
    takes a small part of the time. Whoever plays it says how long a boundary is on its way.
    """
    whole = replace(options, activations=False, min_chunk_bytes=1 << 62)
    return _chain(computation, whole, steps, PASSES[1:])


def lower(computation: Schedule, options: Options) -> Schedule:
    """The whole step, following a step of the same kind. See ``lower_chain``."""
    return lower_chain(computation, options)[-1]


def lower_chain(computation: Schedule, options: Options, *, steps: int = 3) -> list[Schedule]:
    """``steps`` steps that follow each other, the last of which is ``computation`` lowered.

    The deal goes on from step to step, so each begins where the one before ended. The first of
    them follows nothing. Each is pruned against those before it. Raises PlanError for what only a
    device that keeps its weights could run.
    """
    _require_streamed(computation)
    chain = _chain(computation, options, steps, PASSES)
    return prune([set_order(step, options) for step in chain])


def _chain(
    computation: Schedule, options: Options, steps: int, passes: Sequence[Pass]
) -> list[Schedule]:
    """``steps`` steps, each lowered by ``passes`` in view of the one before."""
    turn = (computation.next_start_device - computation.start_device) % computation.num_devices
    starts = [computation.start_device - turn * back for back in range(steps - 1, -1, -1)]
    chain: list[Schedule] = []
    for start in starts:
        step = at_start_device(computation, start % computation.num_devices)
        before = chain[-1] if chain else None
        for one_pass in passes:
            step = one_pass(step, before, options)
        chain.append(step)
    return chain


def _require_streamed(computation: Schedule) -> None:
    """Refuse what cannot run with weights that come and go, or makes a loss that nobody brings."""
    for place in compute_is_grouped_by_visit([computation]):
        raise PlanError(
            f"a device with streamed weights finishes a visit before the next: {place}\n"
            "hint: schedule=gpipe, which does; others are simulated only"
        )
    phases = {visit.phase for visit in computation.visits}
    if Phase.BACKWARD in phases and Phase.FUSED not in phases and not computation.is_continued:
        raise PlanError("no visit is fused, so no action brings the loss down\nhint: fused=True")
    for visit in computation.visits:
        if visit.phase is Phase.BACKWARD:
            recompute, backward = (
                computation.waits[a] for a in visit.compute(visit.microbatches[0])
            )
            if set(recompute) & set(backward):
                raise PlanError("recompute waits for its gradient: that is simulated only")
