"""Cut a chain of layers into stages: forward and backward differently, so all take equally long.

For a limit on the time of a stage the fewest stages come from filling each one as far as the limit
allows (stages are intervals, so greedy is optimal). Trying every limit that matters gives, for
each number of stages, the partition whose longest stage is shortest; whoever plays the schedules
chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roundpipe.plan.costs import Costs, LayerCost

_MAX_LIMITS = 400  # limits tried at most; beyond it they are thinned out evenly


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


def _pack(
    layers: Iterable[int],
    seconds: Callable[[int], float],
    fits: Callable[[list[int]], bool],
    limit: float,
) -> list[list[int]]:
    """Fill groups in order, each as far as ``limit`` seconds and ``fits`` allow, none empty."""
    groups: list[list[int]] = []
    used = 0.0
    for layer in layers:
        more = seconds(layer)
        if groups and used + more <= limit * (1 + 1e-9) and fits([*groups[-1], layer]):
            groups[-1].append(layer)
            used += more
        else:
            groups.append([layer])
            used = more
    return groups


def _interval(group: list[int]) -> range:
    return range(min(group), max(group) + 1)


def _fits(costs: Costs, memory_limit: int | None, *, backward: bool) -> Callable[[list[int]], bool]:
    """Whether two such stages, uploaded one behind the other, fit beside one microbatch."""

    def fits(group: list[int]) -> bool:
        if memory_limit is None:
            return True
        layers = [costs.layers[layer] for layer in group]
        slots = 2 * sum(cost.weight_bytes + backward * cost.gradient_bytes for cost in layers)
        return slots + sum(cost.activation_bytes for cost in layers) <= memory_limit

    return fits


def partition_for(
    costs: Costs, limit: float, *, memory_limit: int | None = None, fuse: int = 1
) -> Partition:
    """The partition with the fewest stages none of which takes longer than ``limit`` seconds.

    A layer that alone takes longer becomes a stage of its own. ``fuse`` layers at least are fused;
    ``memory_limit`` is in bytes for one device. Raises PlanError if one layer does not fit.
    """
    num_layers = costs.num_layers
    fits = _fits(costs, memory_limit, backward=True)
    _require_fits(costs, fits, memory_limit)

    def forward(layer: int) -> float:
        return costs.layers[layer].forward_seconds

    def fused(layer: int) -> float:
        return _fused_seconds(costs.layers[layer])

    least = range(max(num_layers - fuse, 0), num_layers)
    if not fits(list(least)):
        raise PlanError(f"{fuse} fused layers do not fit on the device\nhint: fuse=1")
    top_down = range(num_layers - 1, -1, -1)
    start = min(_pack(top_down, fused, fits, max(limit, sum(map(fused, least))))[0])
    lowest = costs.first_trainable
    backward = [] if lowest is None else _pack(range(start - 1, lowest - 1, -1), fused, fits, limit)
    fits_forward = _fits(costs, memory_limit, backward=False)
    below = _pack(range(start), forward, fits_forward, limit)
    return Partition(
        tuple(map(_interval, below)), range(start, num_layers), tuple(map(_interval, backward))
    )


def _fused_seconds(cost: LayerCost) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _require_fits(costs: Costs, fits: Callable[[list[int]], bool], limit: int | None) -> None:
    for layer, cost in enumerate(costs.layers):
        if not fits([layer]):
            need = 2 * (cost.weight_bytes + cost.gradient_bytes) + cost.activation_bytes
            raise PlanError(
                f"layer {layer} does not fit on the device: {need} bytes of {limit}\n"
                "hint: use more microbatches, a shorter length or a device with more memory"
            )


def forward_stages(costs: Costs, limit: float) -> tuple[range, ...]:
    """Stages for a pass without gradient, none longer than ``limit`` seconds where possible."""
    groups = _pack(
        range(costs.num_layers),
        lambda layer: costs.layers[layer].forward_seconds,
        lambda _: True,
        limit,
    )
    return tuple(map(_interval, groups))


def front(
    costs: Costs, *, memory_limit: int | None = None, fuse: int = 1, longest: float | None = None
) -> list[Partition]:
    """For each number of stages that some limit gives, the partition whose longest is shortest.

    Limits tried are the sums over intervals of layers, which are all that can matter; thinned out
    above a few hundred. ``longest``: no limit above so many seconds. From few stages to many.
    """
    sums: set[float] = set()
    for seconds in (
        [cost.forward_seconds for cost in costs.layers],
        [_fused_seconds(cost) for cost in costs.layers],
    ):
        for first in range(len(seconds)):
            total = 0.0
            for more in seconds[first:]:
                total += more
                sums.add(total)
    limits = sorted(limit for limit in sums if longest is None or limit <= longest) or [min(sums)]
    if len(limits) > _MAX_LIMITS:
        limits = [
            limits[round(i * (len(limits) - 1) / (_MAX_LIMITS - 1))] for i in range(_MAX_LIMITS)
        ]
    best: dict[int, Partition] = {}
    for limit in limits:
        found = partition_for(costs, limit, memory_limit=memory_limit, fuse=fuse)
        best.setdefault(found.num_stages, found)  # limits rise, so the first is the shortest
    return [best[count] for count in sorted(best)]
