"""The rules every schedule obeys. Each rule is a function: its name and docstring ARE the rule.

A step is checked together with the steps before it, because it follows them without a flush. Rules
of structure look at the schedule alone and come first; rules of order replay the chain.

A schedule that is not lowered says what runs and not what moves, so it has rules of its own: it may
interleave visits where no weights need to move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from roundpipe.errors import DeadlockError, PlanError
from roundpipe.plan.actions import COMPUTE, Action, Op, is_action
from roundpipe.plan.clocks import Clocks, order_by_start, run_chain, run_step
from roundpipe.plan.footprint import Accesses, Footprints, Turns
from roundpipe.plan.render import render
from roundpipe.plan.roads import is_kept_apart, pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.plan.clocks import Clock, Node
    from roundpipe.plan.footprint import Buffer, Footprint
    from roundpipe.plan.schedule import Schedule, Visit

_MOST_PLACES = 20  # places an error names at most


def each_action_once(chain: Sequence[Schedule]) -> Iterator[str]:
    """An action stands on exactly one stream, once, and in the order of issue, if any, once."""
    schedule = chain[-1]
    seen: set[Action] = set()
    for name, action in schedule.actions():
        if action in seen:
            yield f"{action} stands twice, the second time on {name}"
        seen.add(action)
    is_issued_once = len(schedule.order) == len(seen) and set(schedule.order) == seen
    if schedule.is_lowered and not is_issued_once:
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
    """An action is issued after all it waits for and as its stream runs: no host waits in a circle.

    So a schedule that keeps this rule can always finish.
    """
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
    """Each microbatch runs forward once through every layer, and backward as far as all others."""
    schedule = chain[-1]
    num_layers = max((visit.layers.stop for visit in schedule.visits), default=0)
    lowest = min((visit.layers.start for visit in schedule.visits if visit.has_backward), default=0)
    trains = any(visit.has_backward for visit in schedule.visits)
    down = list(range(num_layers - 1, lowest - 1, -1)) if trains else []
    for microbatch in range(schedule.num_microbatches):
        forward: list[int] = []
        backward: list[int] = []
        for visit in schedule.visits:
            if microbatch in visit.microbatches:
                forward += visit.layers if visit.phase.value != "backward" else ()
                backward += reversed(visit.layers) if visit.has_backward else ()
        if forward != ([] if schedule.is_continued else list(range(num_layers))):
            yield f"microbatch {microbatch} goes forward through layers {forward}"
        if backward != down:
            yield f"microbatch {microbatch} goes backward through layers {backward}"


def visits_run_whole(chain: Sequence[Schedule]) -> Iterator[str]:
    """Every visit computes each of its microbatches and moves each chunk, on its own device."""
    schedule = chain[-1]
    home = {action: name for name, action in schedule.actions()}
    for visit in schedule.visits:
        wanted = {
            (action, "compute")
            for microbatch in visit.microbatches
            for action in visit.compute(microbatch)
        }
        for op, name in ((Op.UPLOAD, "weights"), (Op.DOWNLOAD, "gradients")):
            count = schedule.chunks.get((op, visit.number), 0)
            wanted |= {(Action(op, visit.number, chunk=chunk), name) for chunk in range(count)}
        for action, name in wanted:
            if home.get(action) != f"{visit.device}.{name}":
                yield f"{action} is not on {visit.device}.{name}: {home.get(action)}"


def every_gradient_is_used(chain: Sequence[Schedule]) -> Iterator[str]:
    """A layer is updated if and only if a gradient came, and has a norm, unless none has.

    Without any norm updates are eager: each stands behind its own gradient alone.
    """
    schedule = chain[-1]
    host = schedule.streams.get("host", ())
    norms = {action.index for action in host if action.op is Op.NORM}
    updates = {action.index for action in host if action.op is Op.UPDATE}
    came = {
        owner
        for action, owners in schedule.owners.items()
        if action.op in (Op.DOWNLOAD, Op.MERGE)
        for owner in owners
    }
    for layer in sorted(came ^ updates | (norms ^ updates if norms else set())):
        yield f"layer {layer} does not have all of a gradient, a norm and an update"


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


def only_stages_that_stay_interleave(chain: Sequence[Schedule]) -> Iterator[str]:
    """A device finishes a visit before it computes the next, unless its layers run nowhere else.

    Then their weights may stay on it, and its visits take turns as they like.
    """
    homes: dict[int, set[int]] = {}
    for visit in chain[-1].visits:
        for layer in visit.layers:
            homes.setdefault(layer, set()).add(visit.device)
    moving = {layer for layer, devices in homes.items() if len(devices) > 1}
    for place in compute_is_grouped_by_visit(chain):
        device = int(place.partition(".")[0])
        layers = sorted(moving & {n for v in chain[-1].visits_on(device) for n in v.layers})
        if layers:
            yield f"{place}, though layers {layers} run elsewhere too"


def nothing_waits_in_a_circle(chain: Sequence[Schedule]) -> Iterator[str]:
    """Run in the order of streams and waits, every action comes to its turn."""
    try:
        _any_order(chain[-1])
    except DeadlockError as error:
        yield str(error)


def compute_follows_what_it_reads(chain: Sequence[Schedule]) -> Iterator[str]:
    """What an action computes with is made before it, and for a backward recomputed on its device.

    Boundaries by a forward that saves them, gradients by the stage above or the loss.
    """
    schedule, clocks = chain[-1], Clocks()
    makers = _makers(schedule)
    for _, name, action, waits in run_step(0, replace(schedule, order=_any_order(schedule))):
        started = clocks.add((0, action), name, waits)
        for what in _what_it_reads(schedule.visits[action.index], action):
            maker = makers.get(what)
            node = (0, maker) if maker is not None else None
            if node is None or node not in clocks.place or not clocks.covers(started, node):
                yield f"{action} on {name} reads {what} without waiting for {maker or 'a maker'}"


def _any_order(schedule: Schedule) -> tuple[Action, ...]:
    return order_by_start(schedule.streams, schedule.waits, lambda _: 1.0)


def _makers(schedule: Schedule) -> dict[Buffer, Action]:
    """What makes each boundary, gradient of a boundary and recomputed visit, by microbatch."""
    makers: dict[Buffer, Action] = {}
    top = max((visit.layers.stop for visit in schedule.visits), default=0)
    for visit in schedule.visits:
        for microbatch in visit.microbatches:
            first, last = visit.compute(microbatch)[0], visit.compute(microbatch)[-1]
            made = [("boundary", to, microbatch) for to in visit.saves]
            if visit.has_backward:
                made = [("boundary_gradient", visit.layers.start, microbatch)]
            elif visit.layers.stop == top:
                made.append(("boundary_gradient", top, microbatch))  # it makes the loss
            makers.update(dict.fromkeys(made, last))
            makers["recomputed", visit.number, microbatch] = first
    return makers


def _what_it_reads(visit: Visit, action: Action) -> Iterator[Buffer]:
    if action.op is Op.BACKWARD:
        yield "boundary_gradient", visit.layers.stop, action.microbatch
        yield "recomputed", visit.number, action.microbatch
    elif visit.layers.start > 0:
        yield "boundary", visit.layers.start, action.microbatch


@dataclass
class Replay:
    """The chain run once: for each action what was surely over when it started."""

    chain: Sequence[Schedule]
    clocks: Clocks = field(default_factory=Clocks)
    runs: list[tuple[Node, Clock, Footprint]] = field(default_factory=list)

    def __post_init__(self) -> None:
        turns, prints = Turns(), []
        for schedule in self.chain:
            prints.append(Footprints(schedule, turns))
            turns = prints[-1].turns_after
        for step, name, action, waits in run_chain(self.chain):
            started = self.clocks.add((step, action), name, waits)
            self.runs.append(((step, action), started, prints[step].of(action)))


def accesses_are_ordered(replay: Replay) -> Iterator[str]:
    """Two actions that touch one buffer, one of them writing, are ordered by streams and waits.

    This one rule holds the order rules of the design: weights of the right version, none
    overwritten while an upload reads them, gradients read after their download, none written
    before the optimizer took the last, no buffer reused before its last use is over.
    """
    clocks, accesses = replay.clocks, Accesses()
    for node, started, touched in replay.runs:
        for other, buffer in accesses.before(node, touched).items():
            if not clocks.covers(started, other):
                who, back = f"{node[1]} on {clocks.place[node][0]}", "-" * (node[0] - other[0])
                yield f"{who} touches {buffer} without waiting for {back}{other[1]}"


_MADE_BY_NAME = frozenset({"boundary", "boundary_gradient", "kept", "gradient", "norm"})
_MADE_FOR_VISIT = frozenset({"slot", "sums", "in", "grad_in", "out"})  # used in turn


def results_are_awaited(replay: Replay) -> Iterator[str]:
    """Whatever an action reads was made in this step, and for the same visit and microbatch."""
    last = len(replay.chain) - 1
    made: dict[Buffer, Action] = {}
    given = _given(replay.chain[-1], last)
    for (step, action), _, touched in replay.runs:
        if step < last:
            continue
        for buffer in touched.reads:
            maker = made.get(buffer)
            if buffer[0] in _MADE_BY_NAME and maker is None and buffer not in given:
                yield f"{action} reads {buffer}, which nothing makes before it"
            if buffer[0] in _MADE_FOR_VISIT and not _is_for(maker, action):
                yield f"{action} reads {buffer}, which {maker or 'nothing'} made before it"
            if buffer[0] == "partial" and not _is_added(replay.chain[-1], maker, action):
                yield f"{action} reads {buffer}, which {maker or 'nothing'} made before it"
        made.update(dict.fromkeys(touched.writes, action))


def _is_added(schedule: Schedule, maker: Action | None, merge: Action) -> bool:
    """Whether a merge is to add up what ``maker`` brought."""
    return maker is not None and maker.index in schedule.addends.get(merge, ())


def _given(schedule: Schedule, step: int) -> set[Buffer]:
    """What the caller gives to a backward whose forward was a pass of its own."""
    if not schedule.is_continued:
        return set()
    top = max(visit.layers.stop for visit in schedule.visits)
    return {
        buffer
        for visit in schedule.visits
        for microbatch in visit.microbatches
        for buffer in (
            ("boundary", step, visit.layers.start, microbatch),
            ("boundary_gradient", step, top, microbatch),
        )
    }


def _is_for(maker: Action | None, reader: Action) -> bool:
    return (
        maker is not None
        and maker.index == reader.index
        and (None in (maker.microbatch, reader.microbatch) or maker.microbatch == reader.microbatch)
    )


def uploads_read_the_right_version(replay: Replay) -> Iterator[str]:
    """Work of step k reads weights of exactly version k - staleness."""
    last = len(replay.chain) - 1
    staleness = replay.chain[-1].staleness
    master: dict[Buffer, int] = {}  # version, counted from the chain's first step
    working: dict[Buffer, int] = {}
    for (step, action), _, touched in replay.runs:
        layer = action.index
        if action.op is Op.UPDATE:
            master["master", layer] = step + 1
        if action.op is Op.PUBLISH or (action.op is Op.UPDATE and not staleness):
            working["weights", layer] = master.get(("master", layer), 0)
        if action.op is Op.UPLOAD and step == last:
            for buffer in touched.reads:
                found, trained = working.get(buffer, -staleness), ("master", buffer[1]) in master
                if trained and found != step - staleness:
                    yield f"{action} reads {buffer} of {step - staleness - found} updates earlier"


def activation_waits_behind_one_chunk(replay: Replay) -> Iterator[str]:
    """On one link and direction an activation never stands behind more than one chunk.

    Of two chunks that follow each other the second waits for an activation that the first did not
    wait for, as long as there is one that may still come between: up, one of a visit before the
    second's own (which needs its weights anyway); down, one of the visits up to the next.
    """
    last = len(replay.chain) - 1
    started = {action: clock for (step, action), clock, _ in replay.runs if step == last}
    for chunk, pair in pairs(replay.chain).items():
        if not is_kept_apart(pair, started[pair.before], started[chunk]):
            yield f"{chunk} may run right behind {pair.before} with nothing of {pair.road} between"


STRUCTURE = (
    each_action_once,
    waits_are_scheduled,
    issue_order_respects_waits,
    every_microbatch_goes_through_every_layer,
    visits_run_whole,
    every_gradient_is_used,
    updates_follow_every_norm,
    gradients_add_in_visit_order,
    compute_is_grouped_by_visit,
)
COMPUTATION = (
    each_action_once,
    waits_are_scheduled,
    nothing_waits_in_a_circle,
    every_microbatch_goes_through_every_layer,
    visits_run_whole,
    only_stages_that_stay_interleave,
)
ORDER = (
    results_are_awaited,
    accesses_are_ordered,
    uploads_read_the_right_version,
    activation_waits_behind_one_chunk,
)


def check(chain: Sequence[Schedule]) -> None:
    """Raise PlanError naming each rule that the last schedule of ``chain`` breaks, and where.

    ``chain`` is the schedule preceded by up to two steps it follows; a single schedule is checked
    as a first step. One that is not lowered is looked at alone. A note on the error draws the
    schedule around the first place.
    """
    last = chain[-1]
    if not last.is_lowered:
        _require(last, (f"{r.__name__}: {place}" for r in COMPUTATION for place in r(chain)))
        rule = compute_follows_what_it_reads
        _require(last, (f"{rule.__name__}: {place}" for place in rule(chain)))
        return
    _require(last, (f"{rule.__name__}: {place}" for rule in STRUCTURE for place in rule(chain)))
    replay = Replay(chain)
    _require(last, (f"{rule.__name__}: {place}" for rule in ORDER for place in rule(replay)))


def _require(schedule: Schedule, places: Iterator[str]) -> None:
    """Raise PlanError with the first of ``places``, if there are any."""
    broken = list(islice(places, _MOST_PLACES))
    if broken:
        error = PlanError("\n".join(broken))
        word = broken[0].split()[1]
        if is_action(word) and (drawn := render(schedule, arrow=Action.parse(word))):
            error.add_note(drawn)
        raise error
