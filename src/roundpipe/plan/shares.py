"""Shares of a device's memory: what a stage may take so that any two that follow each other fit.

Slots of weights and slots of gradients are made once, each kind for the two largest visits that
follow each other anywhere: forward stages, long ones, decide the first, backward stages the second.
So no stage fits or not by itself. `shares_of` gives each kind as much as the longest stages take
that fit all together, long in time: stages are cut at a time, too. What keeps within its shares
fits beside everything else that does. What a schedule takes in the end is `schedule_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from roundpipe.plan.memory import PLACES, microbatch_bytes, room_of, slot_bytes
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.partition import Partition

Favours = Literal["even", "backward"]
_HALVINGS = 16  # of the time of all layers


@dataclass(frozen=True)
class Part:
    """Bytes of a stage, or the most of several: weights, gradients, activations."""

    weights: int = 0
    sums: int = 0
    microbatch: int = 0

    @classmethod
    def of(cls, costs: Costs, layers: range, phase: Phase) -> Part:
        """What one stage takes."""
        weights = slot_bytes(costs, layers, Phase.FORWARD)
        sums = slot_bytes(costs, layers, phase) - weights
        return cls(weights, sums, microbatch_bytes(costs, layers, phase))

    def or_more(self, other: Part) -> Part:
        """The more of each kind."""
        return Part(
            max(self.weights, other.weights),
            max(self.sums, other.sums),
            max(self.microbatch, other.microbatch),
        )

    @property
    def twice(self) -> int:
        """Bytes of a device on which stages of this size follow each other."""
        return 2 * (self.weights + self.sums) + self.microbatch

    def beside(self, fused: Part) -> int:
        """Bytes of a device for stages of this size and a fused one that never follows itself."""
        more = self.or_more(fused)
        return self.weights + more.weights + self.sums + more.sums + more.microbatch


@dataclass(frozen=True)
class Shares:
    """The most that a stage may take of each kind. See the module docstring."""

    costs: Costs
    most: Part

    def holds(self, layers: range, phase: Phase) -> bool:
        """Whether a stage keeps within its shares; then every part of it does."""
        return Part.of(self.costs, layers, phase).or_more(self.most) == self.most


def shares_of(
    costs: Costs,
    limit: int,
    num_fused: int,
    *,
    apart: bool = False,
    favours: Favours = "even",
) -> Shares:
    """The shares of stages below so many fused layers, in ``limit`` bytes of a device.

    ``even``: stages may take the same time forward and backward; what is left goes to longer ones
    backward, then forward. ``backward``: as long as can be there, and forward what is left. If not
    even single layers fit however they follow each other, the shares are those of single layers:
    the largest of each kind need not meet. The fused stage is one like the others or, ``apart``,
    lies beside each of them. Raises PlanError as `room_of`.
    """
    room_of(costs, limit, num_fused, apart=apart)
    below = costs.num_layers - num_fused
    apart = apart and below > 0
    top = Part.of(costs, range(below, costs.num_layers), Phase.FUSED)
    windows = _Windows(costs, below if apart else costs.num_layers)

    def most(forward: float, backward: float) -> Part:
        found = windows.most(forward, backward)
        return found if apart else found.or_more(top)

    def fits(forward: float, backward: float) -> bool:
        part = most(forward, backward)
        return (part.beside(top) if apart else part.twice) <= limit

    whole = windows.all_seconds
    both = -1.0
    if favours == "even":
        both = _highest(lambda seconds: fits(seconds, seconds), both, whole)
    backward = _highest(lambda seconds: fits(both, seconds), both, whole)
    forward = _highest(lambda seconds: fits(seconds, backward), both, backward)
    return Shares(costs, most(forward, backward))


def _highest(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The highest time that fits, about; ``low`` if none does."""
    if low >= high or fits(high):
        return max(low, high)
    for _ in range(_HALVINGS):
        middle = (max(low, 0.0) + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_fused(costs: Costs, limit: int, *, least: int, most: int) -> int:
    """How many layers from ``least`` to ``most`` can be fused beside single layers as stages.

    Raises PlanError if ``least`` do not fit.
    """
    room_of(costs, limit, least, apart=True)

    def is_too_many(num_fused: int) -> bool:
        below = costs.num_layers - num_fused
        top = Part.of(costs, range(below, costs.num_layers), Phase.FUSED)
        need = _Windows(costs, below).most(-1.0, -1.0).beside(top) if below else top.twice
        return num_fused > least and need > limit

    return least - 1 + bisect_left(range(least, max(most, least) + 1), x=True, key=is_too_many)


def partition_bytes(costs: Costs, partition: Partition) -> int:
    """Bytes that suffice for the stages of a partition, whichever follow each other on a device.

    Boundaries that stay on a device between two of its visits come on top, see `schedule_bytes`.
    """
    fused = Part.of(costs, partition.fused, Phase.FUSED)
    others = Part()
    for layers in partition.forward:
        others = others.or_more(Part.of(costs, layers, Phase.FORWARD))
    for layers in partition.backward:
        others = others.or_more(Part.of(costs, layers, Phase.BACKWARD))
    if len(partition.fused) > 1 and partition.num_stages > 1:
        return others.beside(fused)
    return others.or_more(fused).twice


class _Windows:
    """The largest stages among the lowest ``num`` layers that take a given time at most."""

    def __init__(self, costs: Costs, num: int) -> None:
        self._num, layers = num, costs.layers
        lowest = num if costs.first_trainable is None else costs.first_trainable

        def passed(sizes: Iterable[float]) -> list[float]:
            return list(accumulate(sizes, initial=0))

        self._forward = passed(layer.forward_seconds for layer in layers)
        self._both = passed(layer.forward_seconds + layer.backward_seconds for layer in layers)
        self._weights = passed(layer.weight_bytes for layer in layers)
        self._sums = passed(layer.gradient_bytes for layer in layers)
        self._kept = passed(
            layer.activation_bytes if at >= lowest else 0 for at, layer in enumerate(layers)
        )
        self._boundaries = [layer.boundary_bytes for layer in layers]
        self._peaks = [layer.peak_bytes for layer in layers]

    @property
    def all_seconds(self) -> float:
        """Of all layers, forward and backward."""
        return self._both[-1]

    def most(self, forward: float, backward: float) -> Part:
        """The most of each kind; a single layer may take longer than so many seconds."""
        weights = sums = activations = 0.0
        held, boundaries, peaks = self._weights, self._boundaries, self._peaks
        for start, stop in self._longest(self._forward, forward):
            weights = max(weights, held[stop] - held[start])
            ends = PLACES * sum(boundaries[start : stop + 1])
            activations = max(activations, ends + max(peaks[start:stop]))
        for start, stop in self._longest(self._both, backward):
            weights = max(weights, held[stop] - held[start])
            sums = max(sums, self._sums[stop] - self._sums[start])
            ends = 3 * PLACES * max(boundaries[start : stop + 1])
            kept = self._kept[stop] - self._kept[start]
            activations = max(activations, ends + kept + max(peaks[start:stop]))
        return Part(int(weights), int(sums), int(activations))

    def _longest(self, times: list[float], seconds: float) -> Iterator[tuple[int, int]]:
        """From each layer the longest stage of at most ``seconds``, or the layer alone."""
        stop = 0
        for start in range(self._num):
            stop = bisect_right(times, times[start] + seconds, stop, self._num + 1) - 1
            stop = max(stop, start + 1)
            yield start, stop
