"""What the passes share: their options, and a schedule that is being added to.

[Note: turns] A device has two weight slots, two gradient slots and two places for activations each
way. Whoever fills one waits for the last user of two turns ago. If that lies two steps back, the
turn before it is awaited instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Schedule, Visit

T = TypeVar("T", bound=tuple[Any, ...])

MIN_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What lowering needs beside the computation.

    ``staleness``: 0, a step reads the weights of the step before; 1, of the one before that.
    ``accumulate``: calls before in this step have left gradients to add to. ``eager``: a layer is
    updated as soon as its gradient is whole. ``activations``: transfers of boundaries are part of
    the schedule. ``min_chunk_bytes``: smaller pieces of a layer are not sent by themselves.
    """

    costs: Costs
    staleness: int = 0
    accumulate: bool = False  # add to gradients that calls before in this step have left
    eager: bool = False  # update a layer as soon as its gradient is whole, without norms before
    activations: bool = True  # whether transfers of boundaries are part of the schedule
    min_chunk_bytes: int = MIN_CHUNK_BYTES


@dataclass
class Draft:
    """A schedule being added to, with the step before it."""

    base: Schedule
    before: Schedule | None
    streams: dict[str, list[Action]]
    waits: dict[Action, list[Action]]

    @classmethod
    def of(cls, base: Schedule, before: Schedule | None) -> Draft:
        """A draft of ``base``, which itself stays as it is."""
        return cls(
            base,
            before,
            {name: list(queue) for name, queue in base.streams.items()},
            {action: list(after) for action, after in base.waits.items()},
        )

    def put(self, name: str, action: Action, after: Iterable[Action] = ()) -> Action:
        """Append ``action`` to stream ``name``, to run once all of ``after`` are over."""
        self.streams.setdefault(name, []).append(action)
        self.waits[action] = list(after)
        return action

    def done(self, **changes: object) -> Schedule:
        """The schedule as drafted."""
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


def named(action: Action, *, before: bool) -> Action:
    """The action as a wait of this step names it, ``before`` if it is of the step before."""
    return action.of_step_before() if before else action


def two_turns_ago(users: Sequence[T], at: int, last: Callable[[T], Action]) -> list[Action]:
    """The last use of two turns ago, or of one where the step before is too short. [Note: turns]

    Each user ends in whether it is of the step before.
    """
    if at >= 2:
        return [last(users[at - 2])]
    return [last(users[0])] if at == 1 and users[0][-1] else []
