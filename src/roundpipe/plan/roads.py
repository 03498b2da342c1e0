"""Which activations share a link and direction with a chunk, and may still come when it starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.schedule import Schedule

_ROADS = {Op.UPLOAD: ("weights", "activations_up"), Op.DOWNLOAD: ("gradients", "activations_down")}


@dataclass(frozen=True)
class Pair:
    """A chunk, the chunk right before it on its stream, and the activations of their road.

    ``to_come`` counts the road's activations, from the chain's start on, that must not find both
    chunks before them: up, those of visits before the chunk's own (which needs its weights
    anyway); down, those of the visits up to the next.
    """

    before: Action
    road: str
    to_come: int


def pairs(chain: Sequence[Schedule]) -> dict[Action, Pair]:
    """The pair of every chunk of the chain's last step but the first on each stream."""
    found: dict[Action, Pair] = {}
    schedule = chain[-1]
    for device in range(schedule.num_devices):
        numbers = [visit.number for visit in schedule.visits_on(device)]
        turn = {number: at for at, number in enumerate(numbers)}
        for op, (chunked, link) in _ROADS.items():
            road = f"{device}.{link}"
            gone = sum(len(step.streams.get(road, ())) for step in chain[:-1])
            of_visit = Counter(action.index for action in schedule.streams.get(road, ()))
            up_to = list(accumulate((of_visit[number] for number in numbers), initial=gone))
            for one, two in pairwise(schedule.streams.get(f"{device}.{chunked}", ())):
                visits = turn[two.index]
                if op is Op.DOWNLOAD:
                    visits = min(visits + 1 + (one.index == two.index), len(numbers))
                found[two] = Pair(one, road, to_come=up_to[visits])
    return found


def is_kept_apart(pair: Pair, before: dict[str, int], start: dict[str, int]) -> bool:
    """Whether an activation may pass between two chunks that start at these clocks."""
    first = before.get(pair.road, 0)
    return first >= pair.to_come or start.get(pair.road, 0) > first
