"""How much host memory a step takes: the planner's one rule for what fits beside the devices.

What every layer keeps there is in its costs. On top come two things that a plan decides. A layer
that runs backward several times in a step (rounds, a replicated stage) brings a partial gradient
down each time, in fp32, into places that visits use in turn, two for each device, and its sum is
fp32 too. And every backward stage has an input saved for each microbatch that is under way, which
rounds bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit


@dataclass(frozen=True)
class HostBytes:
    """Bytes of host memory, by what they are for."""

    weights: int  # working weights and gradients, which devices copy to and from
    state: int  # master weights and moments
    partial_sums: int = 0  # and what their fp32 sum takes beyond a gradient in working dtype
    saved_inputs: int = 0  # of backward stages, and the gradient of one boundary

    @property
    def pinned(self) -> int:
        """What devices copy to and from all the time."""
        return self.weights + self.partial_sums

    @property
    def pageable(self) -> int:
        """The rest."""
        return self.state + self.saved_inputs

    @property
    def total(self) -> int:
        """All of it."""
        return self.pinned + self.pageable


def host_bytes(costs: Costs, visits: Sequence[Visit]) -> HostBytes:
    """What a step of ``visits`` keeps on the host."""
    return HostBytes(
        weights=sum(layer.pinned_bytes for layer in costs.layers),
        state=sum(layer.pageable_bytes for layer in costs.layers),
        partial_sums=_partial_sums(costs, visits),
        saved_inputs=_saved_inputs(costs, visits),
    )


def _partial_sums(costs: Costs, visits: Sequence[Visit]) -> int:
    """The places, each as large as its largest visit, and what sums take beyond a gradient."""
    layers = costs.layers
    lent = {owner for layer in layers for owner in layer.borrows}
    trained = [_trained(costs, visit) for visit in visits]
    given = Counter(owner for each in trained for _, owners in each for owner in owners)
    merged = {owner for owner, count in given.items() if count > 1}
    while (
        more := {
            owner
            for each in trained
            for _, owners in each
            if merged.intersection(owners)
            for owner in owners
        }
        - merged
    ):
        merged |= more
    summed = [[layer for layer, owners in each if merged.intersection(owners)] for each in trained]
    sizes = [sum(layers[layer].gradient_bytes for layer in each) for each in summed if each]
    count = 2 * len({visit.device for visit in visits})
    places = sum(max(sizes[place::count]) for place in range(min(count, len(sizes))))
    beyond = 0
    for index in {layer for each in summed for layer in each}:
        layer = layers[index]
        if layer.borrows or index in lent:  # where layers share a gradient, costs count one part
            places -= layer.gradient_bytes
        else:
            beyond += max(layer.gradient_bytes - layer.whole_download_bytes, 0)
    return max(places, 0) + beyond


def _trained(costs: Costs, visit: Visit) -> list[tuple[int, tuple[int, ...]]]:
    """The layers whose gradients a visit brings down, each with their owners."""
    if not visit.has_backward:
        return []
    every = [(layer, tuple(costs.owners_trained(layer))) for layer in visit.layers]
    return [(layer, owners) for layer, owners in every if owners]


def _saved_inputs(costs: Costs, visits: Sequence[Visit]) -> int:
    """Of the round that has most of them; the first stage reads what the caller gave."""
    rounds: list[Counter[int]] = []
    stage = len(visits)
    for visit in visits:
        if not rounds or visit.stage < stage:  # dispatch begins with the first stage again
            rounds.append(Counter())
        stage = visit.stage
        if visit.has_backward and visit.layers.start > 0:
            size = costs.layers[visit.layers.start].boundary_bytes
            rounds[-1][visit.layers.start] += size * len(visit.microbatches)
    return max((sum(held.values()) + max(held.values()) for held in rounds if held), default=0)
