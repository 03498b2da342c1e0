"""The rules every schedule obeys. Each rule is a function: its name and docstring ARE the rule.

A step is checked together with the steps before it, because it follows them without a flush.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.clocks import Clocks, run_chain
from roundpipe.plan.footprint import Footprints, Turns
from roundpipe.plan.roads import is_kept_apart, pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.plan.clocks import Node
    from roundpipe.plan.footprint import Buffer
    from roundpipe.plan.schedule import Schedule


def each_action_once(chain: Sequence[Schedule]) -> Iterator[str]:
    """An action stands on exactly one stream, once, and in the order of issue once."""
    schedule = chain[-1]
    seen: set[Action] = set()
    for name, action in schedule.actions():
        if action in seen:
            yield f"{action} stands twice, the second time on {name}"
        seen.add(action)
    if len(schedule.order) != len(set(schedule.order)) or set(schedule.order) != seen:
        yield "the order of issue is not the actions of the streams, each once"


def waits_are_scheduled(chain: Sequence[Schedule]) -> Iterator[str]:
    """Whatever an action waits for is itself in this step or in the step before."""
    here = {action for _, action in chain[-1].actions()}
    earlier = {action for _, action in chain[-2].actions()} if len(chain) > 1 else None
    for action, after in chain[-1].waits.items():
        for other in after:
            known = earlier if other.before else here
            if known is not None and other.of_this_step() not in known:
                yield f"{action} waits for {other}, which nothing runs"


def issue_order_respects_waits(chain: Sequence[Schedule]) -> Iterator[str]:
    """An action is issued after all it waits for and in its stream's order: no host waits in a circle."""
    schedule = chain[-1]
    rank = {action: at for at, action in enumerate(schedule.order)}
    for action, after in schedule.waits.items():
        for other in after:
            if not other.before and rank.get(other, -1) >= rank.get(action, len(rank)):
                yield f"{action} is issued before {other}, which it waits for"
    for name, queue in schedule.streams.items():
        ranks = [rank.get(action, -1) for action in queue]
        if ranks != sorted(ranks):
            yield f"{name} is issued in another order than it runs"


def every_microbatch_goes_through_every_layer(chain: Sequence[Schedule]) -> Iterator[str]:
    """Each microbatch runs forward once through every layer, and backward at most once."""
    schedule = chain[-1]
    for microbatch in range(schedule.num_microbatches):
        forward: list[int] = []
        backward: list[int] = []
        for visit in schedule.visits:
            if microbatch in visit.microbatches:
                forward += visit.layers if visit.phase.value != "backward" else ()
                backward += reversed(visit.layers) if visit.has_backward else ()
        if forward != list(range(len(forward))):
            yield f"microbatch {microbatch} goes forward through layers {forward}"
        if backward and backward != list(range(backward[0], backward[-1] - 1, -1)):
            yield f"microbatch {microbatch} goes backward through layers {backward}"


def accesses_are_ordered(chain: Sequence[Schedule]) -> Iterator[str]:
    """Two actions that touch one buffer, one of them writing, are ordered by streams and waits.

    This one rule holds the order rules of the design: weights of the right version, none
    overwritten while an upload reads them, gradients read after their download, none written
    before the optimizer took the last, no buffer reused before its last use is over.
    """
    clocks = Clocks()
    turns, prints = Turns(), []
    for schedule in chain:
        prints.append(Footprints(schedule, turns))
        turns = turns.after(schedule)
    writes: dict[Buffer, Node] = {}
    reads: dict[Buffer, list[Node]] = {}
    for step, name, action, waits in run_chain(chain):
        clock = clocks.add((step, action), name, waits)
        touched = prints[step].of(action)
        mine = clocks.place[step, action]
        for buffer in (*touched.reads, *touched.writes):
            earlier = [writes[buffer]] if buffer in writes else []
            earlier += reads.get(buffer, []) if buffer in touched.writes else []
            for other in earlier:
                if other != (step, action) and not clocks.covers(clock, other):
                    back = "-" * (step - other[0])
                    yield f"{action} on {mine[0]} touches {buffer} without waiting for {back}{other[1]}"
        for buffer in touched.reads:
            reads.setdefault(buffer, []).append((step, action))
        for buffer in touched.writes:
            writes[buffer], reads[buffer] = (step, action), []


def results_are_awaited(chain: Sequence[Schedule]) -> Iterator[str]:
    """Whatever reads a boundary, a gradient or a norm finds it made, in this step."""
    made: set[Buffer] = set()
    needed = {"boundary", "boundary_gradient", "partial", "norm", "slot", "in", "grad_in"}
    schedule = chain[-1]
    prints = Footprints(schedule, Turns())
    for action in schedule.order:
        touched = prints.of(action)
        for buffer in touched.reads:
            if buffer[0] in needed and buffer not in made:
                yield f"{action} reads {buffer}, which nothing makes before it"
        made.update(touched.writes)


def activation_waits_behind_one_chunk(chain: Sequence[Schedule]) -> Iterator[str]:
    """On one link and direction an activation never stands behind more than one chunk.

    Of two chunks that follow each other the second waits for an activation that the first did not
    wait for, as long as there is one that may still come between: up, one of a visit before the
    second's own (which needs its weights anyway); down, one of the visits up to the next.
    """
    clocks = Clocks()
    started: dict[Action, dict[str, int]] = {}
    for step, name, action, waits in run_chain(chain):
        clock = clocks.add((step, action), name, waits)
        if step == len(chain) - 1:
            started[action] = clock
    for chunk, pair in pairs(chain).items():
        if not is_kept_apart(pair, started[pair.before], started[chunk]):
            yield f"{chunk} may run right behind {pair.before} with nothing of {pair.road} between"


def updates_follow_every_norm(chain: Sequence[Schedule]) -> Iterator[str]:
    """No layer is updated before the norms of all gradients are known: a step commits whole."""
    ops = [action.op for action in chain[-1].streams.get("host", ())]
    if Op.NORM in ops and Op.UPDATE in ops:
        last_norm = len(ops) - 1 - ops[::-1].index(Op.NORM)
        if ops.index(Op.UPDATE) < last_norm:
            yield "an update stands before the last norm on the host stream"


def gradients_add_in_visit_order(chain: Sequence[Schedule]) -> Iterator[str]:
    """Partial gradients are merged in the order of visits, whatever device is ready first."""
    merges = [action.index for action in chain[-1].streams.get("sums", ())]
    if merges != sorted(merges):
        yield f"merges run in the order {merges}"


def compute_is_grouped_by_visit(chain: Sequence[Schedule]) -> Iterator[str]:
    """A device finishes a visit before it computes the next: it holds two slots, no more."""
    for name, queue in chain[-1].streams.items():
        numbers = [action.index for action in queue if action.op in COMPUTE]
        if numbers != sorted(numbers):
            yield f"{name} computes visits in the order {numbers}"


STRUCTURE = (
    each_action_once,
    waits_are_scheduled,
    issue_order_respects_waits,
    every_microbatch_goes_through_every_layer,
    updates_follow_every_norm,
    gradients_add_in_visit_order,
    compute_is_grouped_by_visit,
)
ORDER = (results_are_awaited, accesses_are_ordered, activation_waits_behind_one_chunk)


def check(chain: Sequence[Schedule]) -> None:
    """Raise PlanError naming each rule that the last schedule of ``chain`` breaks, and where.

    ``chain`` is the schedule preceded by up to two steps it follows; a single schedule is checked
    as a first step. A schedule that cannot finish raises DeadlockError.
    """
    for rules in (STRUCTURE, ORDER):
        broken = [f"{rule.__name__}: {place}" for rule in rules for place in rule(chain)]
        if broken:
            raise PlanError("\n".join(broken[:20]))
