"""Cut a chain of layers into stages: forward and backward differently, so all take equally long.

For a limit on the time of a stage the fewest stages come from filling each one as far as time and
memory allow: what is left of a stage that fits fits too, so a longer stage never makes the rest
worse. It follows that the fused stage is best filled first, and that the number of stages only
falls as the limit rises. The only limits that matter are times of intervals of layers, so halving
their list finds, for each number of stages, the least limit that gives it: the front, exactly.

[Note: whole units] Times are added up as integers, in units in which every given time is whole.
Sums of floats depend on their order, and a stage that takes just as long as the limit would be cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isinf
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError
from roundpipe.plan.schedule import Phase
from roundpipe.plan.shares import Shares, largest_fused, shares_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.shares import Favours

_ROUNDING = 1 + 1e-9  # a limit that was added up in floats means its sum


@dataclass(frozen=True)
class Partition:
    """Stages as ranges of layers, each tuple in the order in which its stages run.

    ``forward`` covers the layers below ``fused`` bottom up; ``backward`` covers them top down as
    far as anything is trained.
    """

    forward: tuple[range, ...]
    fused: range
    backward: tuple[range, ...]

    def __post_init__(self) -> None:
        below = [layer for stage in self.forward for layer in stage]
        if below != list(range(self.fused.start)):
            raise PlanError(
                f"forward stages must cover layers 0 to {self.fused.start}: {self.forward}"
            )
        above = [layer for stage in reversed(self.backward) for layer in stage]
        if above and above != list(range(above[0], self.fused.start)):
            raise PlanError(
                f"backward stages must cover layers down from {self.fused.start}: {self.backward}"
            )
        if not self.fused or any(not stage for stage in (*self.forward, *self.backward)):
            raise PlanError(f"a stage holds no layer: {self}")

    @property
    def num_stages(self) -> int:
        """Stages of one round."""
        return len(self.forward) + 1 + len(self.backward)

    def __str__(self) -> str:
        def cut(stages: Iterable[range]) -> str:
            return " ".join(f"{stage.start}-{stage.stop - 1}" for stage in stages) or "none"

        forward, fused, backward = map(cut, (self.forward, [self.fused], self.backward))
        return f"forward {forward} · fused {fused} · backward {backward}"


def partition_for(
    costs: Costs, limit: float, *, memory_limit: int | None = None, fuse: int = 1
) -> Partition:
    """The partition with the fewest stages none of which takes longer than ``limit`` seconds.

    A layer that alone takes longer becomes a stage of its own. ``fuse`` layers at least are fused,
    however long they take; each stage fits into ``memory_limit`` bytes. Among such partitions one
    whose stages are as even as the limit lets them be. Raises PlanError if a layer does not fit.
    """
    cutter = _Cutter(costs, memory_limit, fuse)
    return cutter.cut(cutter.units(limit))


def layer_by_layer(costs: Costs) -> Partition:
    """Every layer a stage of its own, the last one fused: what takes least memory."""
    last, lowest = costs.num_layers - 1, costs.first_trainable
    stages = [range(layer, layer + 1) for layer in range(last + 1)]
    below = [] if lowest is None else stages[lowest:last]
    return Partition(tuple(stages[:-1]), stages[-1], tuple(reversed(below)))


def forward_stages(
    costs: Costs, limit: float, *, memory_limit: int | None = None
) -> tuple[range, ...]:
    """Stages for a pass without gradient, none longer than ``limit`` seconds where possible.

    Beside what a training step takes. Raises PlanError if one layer does not fit into
    ``memory_limit`` bytes.
    """
    num, units = costs.num_layers, _Units(costs)
    shares = None if memory_limit is None else shares_of(costs, memory_limit, 1)
    lane = _Lane(units.forward, _fits(shares, lambda a, b: (range(a, b), Phase.FORWARD)))
    return tuple(lane.stages(0, num, units.of(limit)))


def front(
    costs: Costs,
    *,
    memory_limit: int | None = None,
    fuse: int = 1,
    most_fused: int | None = None,
    longest: float | None = None,
    favours: Favours = "even",
) -> list[Partition]:
    """For each number of stages the partition whose longest stage is shortest, where that pays.

    No other partition that fuses ``fuse`` layers at least, each stage within ``memory_limit``
    bytes, has at most as many stages and a shorter longest one. Where the least fused stage is the
    longest of all, more stages can still shorten the others: the front goes on with those. From
    few stages to many. ``longest``: only what a limit of so many seconds gives, or the nearest.
    ``favours``: which stages scarce memory goes to, see ``roundpipe.plan.shares``.

    With ``most_fused`` the fused stage is set apart: it holds as many layers as fit beside the
    other stages, from ``fuse`` to ``most_fused``, however long they take, and the front is that of
    the others. Raises PlanError if a layer, or ``fuse`` layers together, do not fit.
    """
    cutter = _Cutter(costs, memory_limit, fuse, most_fused, favours)
    limits = cutter.limits()
    if longest is not None:
        limits = limits[: max(bisect_right(limits, cutter.units(longest)), 1)]
    return [cutter.cut(limit) for limit in _least_limits(limits, cutter.count)]


def fused_choices(costs: Costs, memory_limit: int | None = None, *, between: int = 3) -> list[int]:
    """How many top layers are worth fusing, for ``front(costs, fuse=k, most_fused=k)``.

    From one to as many as fit beside the other stages, and so many spread evenly ``between``. No
    layer that backward does not reach: it is never recomputed. Raises PlanError if a layer does not
    fit.
    """
    lowest = costs.first_trainable
    most = 1 if lowest is None else costs.num_layers - lowest
    most = _most_that_fit(costs, memory_limit, 1, most)
    return sorted({1, *(-(-most * part // (between + 1)) for part in range(1, between + 2))})


def _most_that_fit(costs: Costs, memory_limit: int | None, least: int, most: int) -> int:
    if memory_limit is None:
        return max(least, most)
    return largest_fused(costs, memory_limit, least=least, most=most)


class _Units:
    """Times of layers in whole units. See [Note: whole units]."""

    def __init__(self, costs: Costs) -> None:
        ratios = [
            (layer.forward_seconds.as_integer_ratio(), layer.backward_seconds.as_integer_ratio())
            for layer in costs.layers
        ]
        self._a_second = max((below for pair in ratios for _, below in pair), default=1)
        self.forward = [over * (self._a_second // below) for (over, below), _ in ratios]
        backward = [over * (self._a_second // below) for _, (over, below) in ratios]
        self.both = [sum(pair) for pair in zip(self.forward, backward, strict=True)]

    def of(self, seconds: float) -> int:
        """A limit in units."""
        if isinf(seconds):
            return sum(self.both)
        over, below = (seconds * _ROUNDING).as_integer_ratio()
        return over * self._a_second // below


def _fits(
    shares: Shares | None, stage: Callable[[int, int], tuple[range, Phase]]
) -> Callable[[int, int], bool] | None:
    """Whether places ``a`` to ``b`` of a lane fit as one stage; None: they always do."""
    return None if shares is None else lambda a, b: shares.holds(*stage(a, b))


class _Lane:
    """Layers in the order in which stages take them, bottom up or top down: place 0 is the first.

    ``fits(a, b)`` must hold for every part of what it holds for.
    """

    def __init__(self, times: list[int], fits: Callable[[int, int], bool] | None) -> None:
        num = len(times)
        self.passed = list(accumulate(times, initial=0))  # before each place; at the end, of all
        self.reach = [num] * num  # where a stage that begins at a place must end; only rises
        stop = 0
        for start in range(num if fits is not None else 0):
            stop = max(stop, start)
            while stop < num and fits is not None and fits(start, stop + 1):
                stop += 1
            self.reach[start] = stop

    def end(self, start: int, stop: int, limit: int) -> int:
        """How far towards ``stop`` a stage gets from ``start``; one layer always goes."""
        by_time = bisect_right(self.passed, self.passed[start] + limit, start + 1, stop + 1) - 1
        return max(min(by_time, self.reach[start]), start + 1)

    def count(self, start: int, stop: int, limit: int) -> int:
        """The fewest stages from ``start`` to ``stop``."""
        count = 0
        while start < stop:
            start = self.end(start, stop, limit)
            count += 1
        return count

    def limits(self, start: int, stop: int, least: int) -> set[int]:
        """The times, from ``least`` up, of all stages that fit between ``start`` and ``stop``."""
        passed, found = self.passed, set[int]()
        for at in range(start, stop):
            first = bisect_left(passed, passed[at] + least, at + 1, stop + 1)
            last = min(self.reach[at], stop)
            found.update(end - passed[at] for end in passed[first : last + 1])
        return found

    def longest(self, start: int, stop: int) -> int:
        """The time of the longest layer."""
        passed = self.passed[start : stop + 1]
        return max((b - a for a, b in pairwise(passed)), default=0)

    def stages(self, start: int, stop: int, limit: int) -> list[range]:
        """The fewest stages, each with its share of what is left where the limit allows it.

        Even stages take less memory, and the next one of a pipeline waits less for the first. Going
        down from the far end gives the nearest place for each edge; any place from there to as far
        as the stage reaches leaves no more stages than the fewest.
        """
        nearest = [stop]
        while nearest[-1] > start:
            end = nearest[-1]
            by_time = bisect_left(self.passed, self.passed[end] - limit, start, end)
            by_memory = bisect_left(self.reach, end, start, end)
            nearest.append(min(max(by_time, by_memory), end - 1))
        found = []
        for later in range(len(nearest) - 2, -1, -1):  # how many stages come after this one
            farthest = self.end(start, stop - later, limit)
            share = -(-(self.passed[stop] - self.passed[start]) // (later + 1))
            even = bisect_left(self.passed, self.passed[start] + share, start + 1, farthest)
            end = max(even, nearest[later])
            found.append(range(start, end))
            start = end
        return found


class _Cutter:
    """Cuts one chain at any limit. The lane of what runs backward begins at the top layer."""

    def __init__(
        self,
        costs: Costs,
        memory_limit: int | None,
        fuse: int,
        most_fused: int | None = None,
        favours: Favours = "even",
    ) -> None:
        num = self._num = costs.num_layers
        lowest = costs.first_trainable
        self._bottom = 0 if lowest is None else num - lowest  # where the lane backward ends
        self._apart = most_fused is not None
        least, most = min(max(fuse, 1), num), num if most_fused is None else min(most_fused, num)
        shares = None
        if self._apart:
            least = _most_that_fit(costs, memory_limit, least, most)
        if memory_limit is not None:
            shares = shares_of(costs, memory_limit, least, apart=self._apart, favours=favours)
        self._least = least
        units = _Units(costs)
        self.units = units.of
        self._up = _Lane(units.forward, _fits(shares, lambda a, b: (range(a, b), Phase.FORWARD)))
        self._down = _Lane(
            units.both[::-1], _fits(shares, lambda a, b: (range(num - b, num - a), Phase.BACKWARD))
        )

    def _fused(self, limit: int) -> int:
        """How many layers are fused: the more, the fewer stages are left to cut."""
        if self._apart:
            return self._least
        return max(self._least, self._down.end(0, self._num, limit))

    def count(self, limit: int) -> int:
        """The fewest stages at a limit; never more at a higher one."""
        fused = self._fused(limit)
        above = self._down.count(fused, self._bottom, limit)
        return self._up.count(0, self._num - fused, limit) + 1 + above

    def cut(self, limit: int) -> Partition:
        """The partition with the fewest stages at a limit."""
        num, fused = self._num, self._fused(limit)
        down = self._down.stages(fused, self._bottom, limit)
        return Partition(
            tuple(self._up.stages(0, num - fused, limit)),
            range(num - fused, num),
            tuple(range(num - places.stop, num - places.start) for places in down),
        )

    def limits(self) -> list[int]:
        """Every limit at which a partition may change, from the least that can be kept."""
        least = max(
            self._up.longest(0, self._num - self._least),
            self._down.longest(self._least, self._bottom),
        )
        found = self._up.limits(0, self._num - self._least, least)
        found |= self._down.limits(self._least, self._bottom, least)
        if not self._apart:
            found.update(self._down.passed[self._least + 1 : self._down.reach[0] + 1])
        return sorted({least, *(limit for limit in found if limit > least)})


def _least_limits(limits: list[int], count: Callable[[int], int]) -> list[int]:
    """For each number of stages that some limit gives the least such limit, the highest first."""
    found = [limits[0]]
    pending = [(0, count(limits[0]), len(limits) - 1, count(limits[-1]))]
    while pending:
        low, most, high, fewest = pending.pop()
        if most == fewest:
            continue
        if high - low == 1:
            found.append(limits[high])
            continue
        middle = (low + high) // 2
        between = count(limits[middle])
        pending += [(low, most, middle, between), (middle, between, high, fewest)]
    return sorted(found, reverse=True)


def even_stages(costs: Costs, count: int) -> list[range]:
    """So many consecutive stages, each about its share of the work that is left."""
    work = [2 * layer.forward_seconds + layer.backward_seconds for layer in costs.layers]
    count = min(count, len(work))
    stages, start = [], 0
    for left in range(count, 0, -1):
        share = sum(work[start:]) / left
        ends = range(start + 1, len(work) - left + 2)
        first = start
        end = (
            min(ends, key=lambda end: abs(sum(work[first:end]) - share)) if left > 1 else len(work)
        )
        stages.append(range(start, end))
        start = end
    return stages
