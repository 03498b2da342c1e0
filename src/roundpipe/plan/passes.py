"""Passes: lower a computation to a whole step. Each is a pure function from schedule to schedule.

::

    computation ── activations ── weights ── gradients ── updates ── prune ── order

A step follows the one before without a flush, so passes look at that one too: a slot that this
step fills first was used last in the step before. What each wait is for:

[Note: turns] A device has two weight slots, two gradient slots and two places for activations each
way. Whoever fills one waits for the last user of two turns ago. If that lies two steps back, the
turn before it is awaited instead.

[Note: gates] A chunk of weights waits for the activation before it: the first chunk of a visit waits
for its slot, which is free when the device's visit before begins; each other chunk for an activation
of that visit. So an activation never stands behind more than one chunk on the link, without any
priority in hardware. Gradients go down the same way: the first chunk behind the visit's own last
output, the others behind outputs of the visit after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.clocks import Clocks, order_by_start, run_chain
from roundpipe.plan.generators import at_start_device
from roundpipe.plan.roads import is_kept_apart, pairs
from roundpipe.plan.schedule import Phase, Schedule, Visit, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from roundpipe.plan.costs import Costs

T = TypeVar("T")

MIN_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What lowering needs beside the computation."""

    costs: Costs
    staleness: int = 0
    min_chunk_bytes: int = MIN_CHUNK_BYTES


@dataclass
class _Draft:
    """A schedule being added to, with the step before it."""

    base: Schedule
    before: Schedule | None
    streams: dict[str, list[Action]]
    waits: dict[Action, list[Action]]

    @classmethod
    def of(cls, base: Schedule, before: Schedule | None) -> _Draft:
        return cls(
            base,
            before,
            {name: list(queue) for name, queue in base.streams.items()},
            {action: list(after) for action, after in base.waits.items()},
        )

    def put(self, name: str, action: Action, after: Iterable[Action] = ()) -> Action:
        self.streams.setdefault(name, []).append(action)
        self.waits[action] = list(after)
        return action

    def done(self, **changes: object) -> Schedule:
        return replace(
            self.base,
            streams={name: tuple(queue) for name, queue in self.streams.items()},
            waits={action: tuple(dict.fromkeys(after)) for action, after in self.waits.items()},
            **changes,  # type: ignore[arg-type]
        )

    def visits(self, device: int) -> list[tuple[Visit, bool]]:
        """The device's visits, those of the step before first (marked True)."""
        earlier = self.before.visits_on(device) if self.before else []
        return [(visit, True) for visit in earlier] + [
            (visit, False) for visit in self.base.visits_on(device)
        ]


def _named(action: Action, before: bool) -> Action:  # noqa: FBT001
    return action.of_step_before() if before else action


def _two_turns_ago(users: Sequence[T], at: int, last: Callable[[T], Action], *, follows: bool
) -> list[Action]:
    """The last use of two turns ago, or of one turn ago where the step before is too short."""
    if at >= 2:
        return [last(users[at - 2])]
    return [last(users[0])] if at == 1 and follows else []


def add_activations(base: Schedule, before: Schedule | None, _: Options) -> Schedule:
    """Route boundaries and their gradients through the host, except where they stay on the device."""
    draft = _Draft.of(base, before)
    home = {
        action: visit
        for visit in base.visits
        for microbatch in visit.microbatches
        for action in visit.compute(microbatch)
    }
    resident, resident_gradient, keeps_gradient = set(), set(), set()
    sends: dict[tuple[int, int], set[int]] = {
        (visit.number, microbatch): set() for visit in base.visits for microbatch in visit.microbatches
    }
    for action, visit in home.items():
        assert action.microbatch is not None
        key = (visit.number, action.microbatch)
        for source in base.waits[action]:
            maker = home[source]
            stays = maker.device == visit.device and action.op is not Op.RECOMPUTE
            if action.op is Op.BACKWARD:
                if stays:
                    resident_gradient.add(key)
                    keeps_gradient.add((maker.number, action.microbatch))
            elif stays:
                resident.add(key)
            else:
                sends[maker.number, action.microbatch].add(visit.layers.start)
            draft.waits[action] = []
    for visit in base.visits:
        outputs = {to for to in visit.saves if visit.phase is Phase.FORWARD and _is_result(base, to)}
        for microbatch in visit.microbatches:
            sends[visit.number, microbatch] |= outputs
    lowered = replace(
        base,
        sends={key: tuple(sorted(to)) for key, to in sends.items()},
        resident=frozenset(resident),
        resident_gradient=frozenset(resident_gradient),
        keeps_gradient=frozenset(keeps_gradient),
    )
    for device in range(base.num_devices):
        _transfer_activations(draft, lowered, device, base.waits, home)
    draft.base = lowered
    return draft.done()


def _is_result(base: Schedule, boundary: int) -> bool:
    return all(visit.layers.stop <= boundary for visit in base.visits) and not any(
        visit.has_backward for visit in base.visits
    )


def _transfer_activations(
    draft: _Draft,
    lowered: Schedule,
    device: int,
    needs: Mapping[Action, tuple[Action, ...]],
    home: Mapping[Action, Visit],
) -> None:
    """The four kinds of transfer of one device, in the order of its microbatches."""
    items = [
        (visit, microbatch, before)
        for visit, before in draft.visits(device)
        for microbatch in visit.microbatches
    ]
    follows = draft.before is not None
    up, down = stream(device, "activations_up"), stream(device, "activations_down")
    for at, (visit, microbatch, before) in enumerate(items):
        if before:
            continue
        key = (visit.number, microbatch)
        compute = visit.compute(microbatch)

        def last_compute(item: tuple[Visit, int, bool]) -> Action:
            return _named(item[0].compute(item[1])[-1], item[2])

        free = _two_turns_ago(items, at, last_compute, follows=follows)
        sources = [] if key in lowered.resident else [
            Action(Op.ACTIVATION_OUT, home[made].number, microbatch) for made in needs[compute[0]]
        ]
        draft.waits[compute[0]].append(
            draft.put(up, Action(Op.ACTIVATION_IN, visit.number, microbatch), [*sources, *free])
        )
        if visit.phase is Phase.BACKWARD and key not in lowered.resident_gradient:
            made = needs[compute[-1]][0]
            source = Action(Op.GRADIENT_OUT, home[made].number, microbatch)
            draft.waits[compute[-1]].append(
                draft.put(up, Action(Op.GRADIENT_IN, visit.number, microbatch), [source, *free])
            )
    sent = [
        (outs, visit.compute(microbatch)[-1], before)
        for visit, microbatch, before in items
        if (outs := (draft.before if before and draft.before else lowered).outs(visit, microbatch))
    ]
    for at, (outs, maker, before) in enumerate(sent):
        if not before:
            draft.waits[maker] += _two_turns_ago(
                sent, at, lambda item: _named(item[0][-1], item[2]), follows=follows
            )
            for out in outs:
                draft.put(down, out, [maker])


def chunk_layers(costs: Costs, layers: range, num_chunks: int) -> list[tuple[int, ...]]:
    """For each of equal cuts of a visit's weights, the layers of which it holds some bytes."""
    total = sum(costs.layers[layer].weight_bytes for layer in layers)
    out: list[list[int]] = [[] for _ in range(num_chunks)]
    at = 0
    for layer in layers:
        size = costs.layers[layer].weight_bytes
        first = min(at * num_chunks // total, num_chunks - 1) if total else 0
        last = min(max(at + size - 1, at) * num_chunks // total, num_chunks - 1) if total else 0
        for chunk in range(first, last + 1):
            out[chunk].append(layer)
        at += size
    return [tuple(layers) for layers in out]


def _num_chunks(num_bytes: int, windows: int, options: Options) -> int:
    return max(1, min(windows, -(-num_bytes // options.min_chunk_bytes)))  # at least one


def add_weights(base: Schedule, before: Schedule | None, options: Options) -> Schedule:
    """Upload every visit's weights while the device's visit before it computes. [Note: gates]"""
    draft, costs = _Draft.of(base, before), options.costs
    owners, chunks = dict(base.owners), dict(base.chunks)
    publish = Op.PUBLISH if options.staleness else Op.UPDATE
    for device in range(base.num_devices):
        visits = draft.visits(device)
        for at, (visit, is_before) in enumerate(visits):
            if is_before:
                continue
            free = _two_turns_ago(
                visits, at, lambda item: _named(item[0].last, item[1]), follows=before is not None
            )
            earlier, earlier_before = visits[at - 1] if at else (visit, True)
            gates = earlier.microbatches if at else ()
            total = sum(costs.layers[layer].weight_bytes for layer in visit.layers)
            count = chunks[Op.UPLOAD, visit.number] = _num_chunks(total, len(gates) - 1, options)
            for chunk, layers in enumerate(chunk_layers(costs, visit.layers, count)):
                upload = Action(Op.UPLOAD, visit.number, chunk=chunk)
                read = dict.fromkeys(owner for layer in layers for owner in costs.owners_read(layer))
                owners[upload] = tuple(read)
                after = [Action(publish, owner, before=True) for owner in read if owner in costs.owners]
                if gates:
                    gate = Action(Op.ACTIVATION_IN, earlier.number, gates[chunk * len(gates) // count])
                    after.append(_named(gate, earlier_before))
                draft.put(stream(device, "weights"), upload, [*after, *(free if chunk == 0 else ())])
            draft.waits[visit.first].append(Action(Op.UPLOAD, visit.number, chunk=count - 1))
    return draft.done(owners=owners, chunks=chunks)


def _trained(costs: Costs, visit: Visit) -> tuple[int, ...]:
    """Owners whose gradient the visit adds to."""
    if not visit.has_backward:
        return ()
    return tuple(dict.fromkeys(o for layer in visit.layers for o in costs.owners_trained(layer)))


def add_gradients(base: Schedule, before: Schedule | None, options: Options) -> Schedule:
    """Download each visit's gradients once; add up on the host, in visit order, where several come."""
    draft, costs = _Draft.of(base, before), options.costs
    owners, chunks = dict(base.owners), dict(base.chunks)
    givers: dict[int, int] = {}
    for visit in base.visits:
        for owner in _trained(costs, visit):
            givers[owner] = givers.get(owner, 0) + 1
    for device in range(base.num_devices):
        visits = [item for item in draft.visits(device) if _trained(costs, item[0])]
        for at, (visit, is_before) in enumerate(visits):
            if is_before:
                continue
            trained = _trained(costs, visit)
            direct = tuple(owner for owner in trained if givers[owner] == 1)
            windows = _windows_after(draft.base, visit)
            total = sum(costs.layers[layer].gradient_bytes for layer in visit.layers)
            count = chunks[Op.DOWNLOAD, visit.number] = _num_chunks(total, len(windows), options)
            taken = [Action(Op.UPDATE, owner, before=True) for owner in direct]
            if direct != trained:
                taken.append(Action(Op.MERGE, visit.number, before=True))
            for chunk in range(count):
                download = Action(Op.DOWNLOAD, visit.number, chunk=chunk)
                owners[download] = direct
                if chunk == 0:
                    own = base.outs(visit, visit.microbatches[-1])
                    after = [own[-1] if own else visit.last, *taken]
                else:
                    after = [windows[chunk * len(windows) // count - 1]]
                draft.put(stream(device, "gradients"), download, after)

            def last_download(item: tuple[Visit, bool]) -> Action:
                made = chunks if not item[1] else (draft.before or base).chunks
                last = Action(Op.DOWNLOAD, item[0].number, chunk=made[Op.DOWNLOAD, item[0].number] - 1)
                return _named(last, item[1])

            writer = visit.compute(visit.microbatches[0])[-1]
            draft.waits[writer] += _two_turns_ago(
                visits, at, last_download, follows=before is not None
            )
    for visit in base.visits:
        partial = tuple(owner for owner in _trained(costs, visit) if givers[owner] > 1)
        if partial:
            merge = Action(Op.MERGE, visit.number)
            last = Action(Op.DOWNLOAD, visit.number, chunk=chunks[Op.DOWNLOAD, visit.number] - 1)
            taken = [Action(Op.UPDATE, owner, before=True) for owner in partial]
            owners[draft.put("sums", merge, [last, *taken])] = partial
    return draft.done(owners=owners, chunks=chunks)


def _windows_after(base: Schedule, visit: Visit) -> list[Action]:
    """What leaves the device during its next visit of this step, one per microbatch."""
    following = [other for other in base.visits_on(visit.device) if other.number > visit.number]
    if not following:
        return []
    outs = [base.outs(following[0], microbatch) for microbatch in following[0].microbatches]
    return [out[0] for out in outs if out]


def add_updates(base: Schedule, _: Schedule | None, options: Options) -> Schedule:
    """On the host: each layer's norm as its gradient completes, then all updates, front first.

    The host stream runs in order, so the first update comes after the last norm: the step commits
    there or not at all. At staleness 1 a layer is published (the update of the step before) once
    this step has read its old weights for the last time.
    """
    draft, costs = _Draft.of(base, None), options.costs
    gives: dict[int, tuple[int, Action]] = {}
    uploads: dict[int, list[Action]] = {}
    for _name, action in base.actions():
        for owner in base.owners.get(action, ()):
            if action.op is Op.UPLOAD:
                uploads.setdefault(owner, []).append(action)
            elif action.op is Op.MERGE or action.chunk == base.chunks[Op.DOWNLOAD, action.index] - 1:
                gives[owner] = max(gives.get(owner, (-1, action)), (action.index, action), key=_first)
    trained = sorted(gives, key=lambda owner: (gives[owner][0], -owner))
    for owner in trained:
        if options.staleness:
            draft.put("host", Action(Op.PUBLISH, owner), uploads[owner])
        draft.put("host", Action(Op.NORM, owner), [gives[owner][1]])
    for owner in sorted(trained):
        draft.put("host", Action(Op.UPDATE, owner))
    return draft.done(staleness=options.staleness)


def _first(pair: tuple[int, Action]) -> int:
    return pair[0]


def set_order(base: Schedule, options: Options) -> Schedule:
    """Give all actions one order in which hosts may issue them."""

    def seconds(action: Action) -> float:
        if action.op not in COMPUTE:
            return 1e-9
        costs = [options.costs.layers[layer] for layer in base.visits[action.index].layers]
        forward, backward = (sum(c.forward_seconds for c in costs), sum(c.backward_seconds for c in costs))
        return {Op.FUSED: forward + backward, Op.BACKWARD: backward}.get(action.op, forward) + 1e-9

    return replace(base, order=order_by_start(base.streams, base.waits, seconds))


def prune(chain: Sequence[Schedule]) -> Schedule:
    """The last of the chain without waits that its streams' order or other waits imply.

    A gate goes too where the chunks are kept apart without it.
    """
    clocks, roads = Clocks(), pairs(chain)
    kept: dict[Action, tuple[Action, ...]] = {}
    started: dict[Action, dict[str, int]] = {}
    this = len(chain) - 1
    for step, name, action, waits in run_chain(chain):
        if step == this:
            needed = clocks.essential(name, waits)
            gates = [node for node in needed if node[1].op is Op.ACTIVATION_IN]
            if action.op is Op.UPLOAD and gates:
                without = [node for node in needed if node not in gates]
                pair, clock = roads.get(action), clocks.before(name, without)
                if pair is None or is_kept_apart(pair, started[pair.before], clock):
                    needed = clocks.essential(name, [node for node in waits if node not in gates])
            started[action] = clocks.before(name, needed)
            waits = tuple(needed)  # noqa: PLW2901
            kept[action] = tuple(
                other if owner == this else other.of_step_before() for owner, other in needed
            )
        clocks.add((step, action), name, waits)
    return replace(chain[-1], waits=kept)


PASSES = (add_activations, add_weights, add_gradients, add_updates)


def lower(computation: Schedule, options: Options) -> Schedule:
    """The whole step for ``computation``, following a step of the same kind. See ``lower_chain``."""
    return lower_chain(computation, options)[-1]


def lower_chain(computation: Schedule, options: Options, *, steps: int = 3) -> list[Schedule]:
    """``steps`` steps that follow each other, the last of which is ``computation`` lowered.

    The deal goes on from step to step, so each begins where the one before ended. The first of
    them follows nothing. Each is pruned against those before it.
    """
    turn = (computation.next_start_device - computation.start_device) % computation.num_devices
    starts = [computation.start_device - turn * back for back in range(steps - 1, -1, -1)]
    chain: list[Schedule] = []
    for start in starts:
        step = at_start_device(computation, start % computation.num_devices)
        before = chain[-1] if chain else None
        for one_pass in PASSES:
            step = one_pass(step, before, options)
        step = set_order(step, options)
        chain.append(step)
    return [prune(chain[: i + 1]) for i in range(steps)]


