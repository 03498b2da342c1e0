"""Passes that move weights up and gradients down, in chunks that let activations pass.

[Note: gates] A chunk of weights waits for the activation before it: the first chunk of a visit
waits for its slot, which is free when the device's visit before begins; each other chunk for an
activation of that visit. So an activation never stands behind more than one chunk on the link,
without any priority in hardware. Gradients go down the same way: the first chunk behind the
visit's own last output, the others behind outputs of the visit after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.draft import Draft, Options, named, two_turns_ago
from roundpipe.plan.schedule import Schedule, Visit, num_places, stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.plan.costs import Costs


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
    draft = Draft.of(base, before)
    owners, chunks = dict(base.owners), dict(base.chunks)
    for device in range(base.num_devices):
        visits = draft.visits(device)
        for at, (visit, is_before) in enumerate(visits):
            if is_before:
                continue
            free = two_turns_ago(visits, at, lambda item: named(item[0].last, before=item[1]))
            gates = []
            if at and options.activations:
                earlier, of_before = visits[at - 1]
                gates = [
                    named(Action(Op.ACTIVATION_IN, earlier.number, microbatch), before=of_before)
                    for microbatch in earlier.microbatches
                ]
            read = _upload(draft, visit, options, free, gates)
            owners.update(read)
            chunks[Op.UPLOAD, visit.number] = len(read)
            draft.waits[visit.first].append(list(read)[-1])
    return draft.done(owners=owners, chunks=chunks)


def _upload(
    draft: Draft, visit: Visit, options: Options, free: list[Action], gates: list[Action]
) -> dict[Action, tuple[int, ...]]:
    """Put the chunks of one visit's weights; returns the owners that each reads.

    ``free`` is what the slot waits for. Where that only stands in for a use two steps back, a wait
    for updated weights does as well and holds up less: all of that step is over before it.
    """
    stands_in = [(a.index, a.before) for a in free] == [(a.index, a.before) for a in gates[:1]]
    costs = options.costs
    total = sum(costs.layers[layer].weight_bytes for layer in visit.layers)
    count = _num_chunks(total, len(gates) - 1, options)
    publish = Op.PUBLISH if options.staleness else Op.UPDATE
    host = draft.before.streams.get("host", ()) if draft.before else ()
    published = {action.index for action in host if action.op is publish}
    owners = {}
    for chunk, layers in enumerate(chunk_layers(costs, visit.layers, count)):
        upload = Action(Op.UPLOAD, visit.number, chunk=chunk)
        read = dict.fromkeys(owner for layer in layers for owner in costs.owners_read(layer))
        owners[upload] = tuple(read)
        after = [Action(publish, owner, before=True) for owner in read if owner in published]
        gate = [gates[chunk * len(gates) // count]] if gates else []
        if chunk == 0 and not (after and stands_in):
            after += free
        draft.put(stream(visit.device, "weights"), upload, [*after, *gate])
    return owners


def add_gradients(base: Schedule, before: Schedule | None, options: Options) -> Schedule:
    """Download each visit's gradients once; add up on the host where several come.

    What the visits of one stage in one round bring is added to the sum at once, in visit order, so
    the sum is read and written once for all of them. Then their memory is free for later visits:
    there are two places for each device. A visit's first backward waits for its gradient slot as
    uploads do for theirs.
    """
    draft = Draft.of(base, before)
    owners, chunks = dict(base.owners), dict(base.chunks)
    merged = _merged_owners(base, options)
    groups = _groups(base, options.costs, merged)
    merges = {
        visit.number: Action(Op.MERGE, group[-1].number) for group in groups for visit in group
    }
    free = _free_on_host(draft, merges)
    for device in range(base.num_devices):
        visits = [item for item in draft.visits(device) if _trained(options.costs, item[0])]
        for at, (visit, is_before) in enumerate(visits):
            if is_before:
                continue
            sent = _download(draft, visit, options, merged, free.get(visit.number, ()))
            owners.update(sent)
            chunks[Op.DOWNLOAD, visit.number] = len(sent)

            def last_download(item: tuple[Visit, bool]) -> Action:
                made = draft.before.chunks if item[1] and draft.before else chunks
                return named(_last_download(item[0], made), before=item[1])

            if at >= 2:  # else two turns ago is two steps back, which the upload has awaited
                writer = visit.compute(visit.microbatches[0])[-1]
                draft.waits[writer] += two_turns_ago(visits, at, last_download)
    addends: dict[Action, tuple[int, ...]] = {}
    for group in groups:
        merge = merges[group[-1].number]
        gave = [owner for visit in group for owner in _trained(options.costs, visit)]
        whole = tuple(dict.fromkeys(owner for owner in gave if owner in merged))
        brought = [_last_download(visit, chunks) for visit in group]
        taken = [Action(Op.UPDATE, owner, before=True) for owner in whole]
        draft.put("sums", merge, [*brought, *taken])
        owners[merge], addends[merge] = whole, tuple(visit.number for visit in group)
    return draft.done(owners=owners, chunks=chunks, addends=addends)


def _groups(base: Schedule, costs: Costs, merged: set[int]) -> list[list[Visit]]:
    """Visits whose gradients are added up at once, on as many devices: a stage in one round."""
    groups: list[list[Visit]] = []
    for visit in base.visits:
        if merged.isdisjoint(_trained(costs, visit)):
            continue
        last = groups[-1] if groups else []
        is_next = bool(last) and (last[-1].number, last[-1].stage) == (
            visit.number - 1,
            visit.stage,
        )
        if is_next and visit.device not in {other.device for other in last}:
            last.append(visit)
        else:
            groups.append([visit])
    return groups


def _free_on_host(draft: Draft, merges: Mapping[int, Action]) -> dict[int, list[Action]]:
    """For each visit what frees the place on the host into which it brings partial sums.

    Places are used in turn through the step, from the first one on in each.
    """
    users, count = sorted(merges), num_places(draft.base)
    free: dict[int, list[Action]] = {}
    for rank, visit in enumerate(users):
        last = users[rank + (len(users) - 1 - rank) // count * count]
        free[visit] = [merges[last].of_step_before()] if draft.before else []
        if rank >= count:
            free[visit] = [merges[users[rank - count]]]
    return free


def _trained(costs: Costs, visit: Visit) -> tuple[int, ...]:
    """Owners whose gradient the visit adds to."""
    if not visit.has_backward:
        return ()
    return tuple(dict.fromkeys(o for layer in visit.layers for o in costs.owners_trained(layer)))


def _last_download(visit: Visit, chunks: Mapping[tuple[Op, int], int]) -> Action:
    last = chunks[Op.DOWNLOAD, visit.number] - 1
    return Action(Op.DOWNLOAD, visit.number, chunk=last)


def _download(
    draft: Draft, visit: Visit, options: Options, merged: set[int], free: Sequence[Action]
) -> dict[Action, tuple[int, ...]]:
    """Put the chunks of one visit's gradients; returns the owners whose gradient each writes.

    ``free``: what the memory for its partial sums waits for.
    """
    direct = tuple(owner for owner in _trained(options.costs, visit) if owner not in merged)
    taken = [*(Action(Op.UPDATE, owner, before=True) for owner in direct), *free]
    windows = _windows_after(draft.base, visit)
    total = sum(options.costs.layers[layer].gradient_bytes for layer in visit.layers)
    count = _num_chunks(total, len(windows), options)
    owners = {}
    for chunk in range(count):
        download = Action(Op.DOWNLOAD, visit.number, chunk=chunk)
        owners[download] = direct
        if chunk == 0:
            own = draft.base.outs(visit, visit.microbatches[-1]) if options.activations else ()
            after = [own[-1] if own else visit.last, *taken]
        else:
            after = [windows[chunk * len(windows) // count - 1]]
        draft.put(stream(visit.device, "gradients"), download, after)
    return owners


def _merged_owners(base: Schedule, options: Options) -> set[int]:
    """Owners to whose gradient several contributions come in a step, so that the host adds them up.

    A layer sends all it has the same way, so what shares a layer with such an owner is merged too.
    """
    contributions = [
        options.costs.owners_trained(layer)
        for visit in base.visits
        if visit.has_backward
        for layer in visit.layers
    ]
    every = [owner for owners in contributions for owner in owners]
    merged = {owner for owner in every if options.accumulate or every.count(owner) > 1}
    while more := {o for owners in contributions if merged & set(owners) for o in owners} - merged:
        merged |= more
    return merged


def _windows_after(base: Schedule, visit: Visit) -> list[Action]:
    """What leaves the device during its next visit of this step, one per microbatch."""
    following = [other for other in base.visits_on(visit.device) if other.number > visit.number]
    if not following:
        return []
    outs = [base.outs(following[0], microbatch) for microbatch in following[0].microbatches]
    return [out[0] for out in outs if out]
