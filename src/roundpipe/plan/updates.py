"""The last pass: what the optimizer does on the host beside all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.draft import Draft, Options

if TYPE_CHECKING:
    from roundpipe.plan.schedule import Schedule


def add_updates(base: Schedule, _: Schedule | None, options: Options) -> Schedule:
    """On the host: each layer's norm as its gradient completes, then all updates, front first.

    Eager updates take the place of norms.

    The host stream runs in order, so the first update comes after the last norm: the step commits
    there or not at all. At staleness 1 a layer is published (the update of the step before) once
    this step has read its old weights for the last time. That is about two visits of every device
    before their gradient is down (which ends in chunks beside the visit after it), and the next
    step waits for it, so it must not stand behind norms that come later.
    """
    draft = Draft.of(base, None)
    gives = _last_givers(base)
    when_whole = Op.UPDATE if options.eager else Op.NORM
    queue = [
        (actions[-1].index, 1, -owner, Action(when_whole, owner), actions)
        for owner, actions in gives.items()
    ]
    if options.staleness:
        uploads = _uploads(base)
        queue += [
            (
                max(upload.index for upload in uploads[owner]) - 2 * base.num_devices,
                0,
                owner,
                Action(Op.PUBLISH, owner),
                uploads[owner],
            )
            for owner in gives
        ]
    for *_when, action, after in sorted(queue, key=lambda item: item[:3]):
        draft.put("host", action, after)
    if not options.eager:
        for owner in sorted(gives):
            draft.put("host", Action(Op.UPDATE, owner))
    return draft.done(staleness=options.staleness)


def _uploads(base: Schedule) -> dict[int, list[Action]]:
    """For each owner the uploads that read its weights, in the order of visits."""
    uploads: dict[int, list[Action]] = {}
    for visit in base.visits:
        for chunk in range(base.chunks[Op.UPLOAD, visit.number]):
            upload = Action(Op.UPLOAD, visit.number, chunk=chunk)
            for owner in base.owners[upload]:
                uploads.setdefault(owner, []).append(upload)
    return uploads


def _last_givers(base: Schedule) -> dict[int, list[Action]]:
    """For each owner the actions after which its gradient is whole, that of its last visit last."""
    gives: dict[int, list[Action]] = {}
    for _name, action in base.actions():
        if action.op is Op.MERGE or _is_last_chunk(base, action):
            for owner in base.owners[action]:
                if owner not in gives or gives[owner][-1].index < action.index:
                    gives[owner] = [action]
    return gives


def _is_last_chunk(base: Schedule, action: Action) -> bool:
    return (
        action.op is Op.DOWNLOAD
        and action.chunk == base.chunks.get((Op.DOWNLOAD, action.index), 0) - 1
    )
