"""The first pass: how boundary activations and their gradients get from visit to visit.

They go through the host, except where the next user runs on the same device. A recompute always
takes its input from the host: by then the device has forgotten it. The same way goes what the
forward of its layers keeps for it: mostly nothing, but nobody knows that before a layer has run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.draft import Draft, Options, named, two_turns_ago
from roundpipe.plan.schedule import Phase, Schedule, Visit, stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Use = tuple[Visit, int, bool]  # a visit, a microbatch, whether of the step before


def add_activations(base: Schedule, before: Schedule | None, _: Options) -> Schedule:
    """Route boundaries and their gradients through the host, except where they may stay."""
    draft = Draft.of(base, before)
    home = {
        action: visit
        for visit in base.visits
        for microbatch in visit.microbatches
        for action in visit.compute(microbatch)
    }
    draft.base = _routed(base, home)
    for action in home:
        draft.waits[action] = []
    for device in range(base.num_devices):
        uses: list[Use] = [
            (visit, microbatch, is_before)
            for visit, is_before in draft.visits(device)
            for microbatch in visit.microbatches
        ]
        _bring_in(draft, device, uses, base.waits, home)
        _send_out(draft, device, uses)
    return draft.done()


def _routed(base: Schedule, home: Mapping[Action, Visit]) -> Schedule:
    """``base`` with what stays on a device and what is sent, to whom."""
    resident, resident_gradient, keeps_gradient = set(), set(), set()
    sends: dict[tuple[int, int], set[int]] = {
        (visit.number, microbatch): set(visit.results)
        for visit in base.visits
        for microbatch in visit.microbatches
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
    return replace(
        base,
        sends={key: tuple(sorted(to)) for key, to in sends.items()},
        resident=frozenset(resident),
        resident_gradient=frozenset(resident_gradient),
        keeps_gradient=frozenset(keeps_gradient),
    )


def _bring_in(
    draft: Draft,
    device: int,
    uses: Sequence[Use],
    needs: Mapping[Action, tuple[Action, ...]],
    home: Mapping[Action, Visit],
) -> None:
    """What each microbatch of each visit waits to have on the device, in order. [Note: turns]"""

    def last_compute(use: Use) -> Action:
        return named(use[0].compute(use[1])[-1], before=use[2])

    up = stream(device, "activations_up")
    for at, (visit, microbatch, is_before) in enumerate(uses):
        if is_before:
            continue
        key = (visit.number, microbatch)
        compute = visit.compute(microbatch)
        free = two_turns_ago(uses, at, last_compute)
        makers = () if key in draft.base.resident else needs[compute[0]]
        sources = [Action(Op.ACTIVATION_OUT, home[made].number, microbatch) for made in makers]
        kept = draft.base.kept_for.get(key, ())
        sources += [Action(Op.ACTIVATION_OUT, keeper, microbatch) for keeper in kept]
        arrival = draft.put(up, Action(Op.ACTIVATION_IN, *key), [*sources, *free])
        draft.waits[compute[0]].append(arrival)
        if visit.phase is Phase.BACKWARD and key not in draft.base.resident_gradient:
            sources = [
                Action(Op.GRADIENT_OUT, home[maker].number, microbatch)
                for maker in needs[compute[-1]]  # none: the caller gives it
            ]
            arrival = draft.put(up, Action(Op.GRADIENT_IN, *key), [*sources, *free])
            draft.waits[compute[-1]].append(arrival)


def _send_out(draft: Draft, device: int, uses: Sequence[Use]) -> None:
    """What leaves the device after each microbatch of each visit, in order. [Note: turns]

    A microbatch of which nothing leaves takes its turn too. If it is the device's only one in this
    step it awaits the turn right before, so that the next step need not look behind it.
    """

    def last_use(use: Use) -> Action:
        visit, microbatch, is_before = use
        schedule = draft.before if is_before and draft.before else draft.base
        outs = schedule.outs(visit, microbatch)
        return named(outs[-1] if outs else visit.compute(microbatch)[-1], before=is_before)

    down = stream(device, "activations_down")
    num_uses = sum(not is_before for _, _, is_before in uses)
    for at, (visit, microbatch, is_before) in enumerate(uses):
        if is_before:
            continue
        outs = draft.base.outs(visit, microbatch)
        maker = visit.compute(microbatch)[-1]
        if at and num_uses == 1 and not outs:
            draft.waits[maker].append(last_use(uses[at - 1]))
        draft.waits[maker] += two_turns_ago(uses, at, last_use)
        for out in outs:
            draft.put(down, out, [maker])
