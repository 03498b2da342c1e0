"""The front of partitions against all partitions, tried one by one, and what it costs."""

from __future__ import annotations

import random
import time
from math import inf, log2
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.memory import stage_bytes
from roundpipe.plan.partition import Partition, _least_limits, front
from roundpipe.plan.schedule import Phase
from roundpipe.plan.shares import Part, partition_bytes, shares_of

if TYPE_CHECKING:
    from collections.abc import Callable


def took(costs: Costs, stage: range, phase: Phase) -> float:
    held = [costs.layers[layer] for layer in stage]
    backward = 0 if phase is Phase.FORWARD else sum(cost.backward_seconds for cost in held)
    return sum(cost.forward_seconds for cost in held) + backward


def longest(costs: Costs, partition: Partition, *, least: int = 0) -> float:
    """Seconds of the longest stage; a fused stage of at most ``least`` layers does not count."""
    is_counted = len(partition.fused) > least
    fused = took(costs, partition.fused, Phase.FUSED) if is_counted else 0.0
    forward = [took(costs, stage, Phase.FORWARD) for stage in partition.forward]
    backward = [took(costs, stage, Phase.BACKWARD) for stage in partition.backward]
    return max([fused, *forward, *backward])


class BruteForce:
    """All partitions of a chain, one by one: every cut of every phase, no rule of thumb at all."""

    def __init__(self, costs: Costs, fits: Callable[[range, Phase], bool]) -> None:
        self.costs, self.fits = costs, fits
        num, lowest = costs.num_layers, costs.first_trainable
        self.forward = self._cuts(0, Phase.FORWARD)
        bottom = num if lowest is None else lowest
        self.backward = self._cuts(bottom, Phase.BACKWARD)
        for top in range(bottom + 1):  # nothing below a fused stage that begins there is trained
            self.backward[top] = {0: 0.0}

    def _cuts(self, bottom: int, phase: Phase) -> dict[int, dict[int, float]]:
        """Of every way to cut from ``bottom`` up to each layer: stages -> least longest stage."""
        num = self.costs.num_layers
        stages = {
            (start, stop): took(self.costs, range(start, stop), phase)
            for start in range(bottom, num)
            for stop in range(start + 1, num + 1)
            if self.fits(range(start, stop), phase)
        }
        best: dict[int, dict[int, float]] = {bottom: {0: 0.0}}
        pending = [(bottom, 0, 0.0)]
        while pending:
            start, count, longest = pending.pop()
            for stop in range(start + 1, num):
                if (start, stop) in stages:
                    cut = (stop, count + 1, max(longest, stages[start, stop]))
                    pending.append(cut)
                    counts = best.setdefault(stop, {})
                    counts[count + 1] = min(cut[2], counts.get(count + 1, inf))
        return best

    def front(self, fused: range, *, least: int = 0) -> dict[int, float]:
        """Stages -> longest, where fewer stages take longer; ``fused``: numbers of fused layers."""
        num, best = self.costs.num_layers, dict[int, float]()
        for top in (range(num - count, num) for count in fused):
            if not self.fits(top, Phase.FUSED):
                continue
            alone = took(self.costs, top, Phase.FUSED) if len(top) > least else 0.0
            for below, a in self.forward.get(top.start, {}).items():
                for above, b in self.backward.get(top.start, {}).items():
                    count = below + 1 + above
                    best[count] = min(max(alone, a, b), best.get(count, inf))
        return pareto(best)


def pareto(best: dict[int, float]) -> dict[int, float]:
    """What no fewer stages reach."""
    counts = sorted(best)
    return {
        count: best[count]
        for at, count in enumerate(counts)
        if all(best[count] < best[fewer] for fewer in counts[:at])
    }


def a_chain(draw: random.Random) -> Costs:
    """Up to 12 layers whose times tie, are zero, differ a million times or hardly at all."""
    time_of = draw.choice(
        [
            lambda: draw.randint(0, 3),
            lambda: draw.randint(900, 1000) / 1024,
            lambda: 2.0 ** draw.randint(-10, 10) * draw.randint(0, 1023),
            lambda: 1 / 4,
        ]
    )
    size_of = draw.choice([lambda: draw.randint(0, 9), lambda: 10, lambda: 2 ** draw.randint(0, 9)])
    num = draw.randint(1, 12)
    lowest = draw.choice([0, 0, draw.randint(0, num)])
    layers = tuple(
        LayerCost(
            forward_seconds=time_of(),
            backward_seconds=time_of(),
            weight_bytes=size_of(),
            gradient_bytes=0 if at < lowest or draw.random() < 0.2 else 1 + size_of(),
            boundary_bytes=size_of(),
            activation_bytes=size_of(),
            peak_bytes=size_of(),
        )
        for at in range(num)
    )
    return Costs(layers, frozenset(range(lowest, num)))


def a_memory_limit(draw: random.Random, costs: Costs) -> int | None:
    """None, enough, scarce or too little."""
    num = costs.num_layers
    alone = max(stage_bytes(costs, range(at, at + 1), Phase.BACKWARD) for at in range(num))
    whole = stage_bytes(costs, range(num), Phase.BACKWARD)
    return draw.choice([None, whole, draw.randint(alone, whole), alone + whole // num, alone - 1])


def front_or_nothing(costs: Costs, **options) -> list[Partition]:
    try:
        partitions = front(costs, **options)
    except PlanError:
        return []
    counts = [each.num_stages for each in partitions]
    assert counts == sorted(set(counts))
    assert all(len(each.fused) >= options["fuse"] for each in partitions)
    return partitions


def test_the_front_equals_brute_force_on_500_chains() -> None:
    draw = random.Random(1)
    refused = 0
    for _ in range(500):
        costs = a_chain(draw)
        limit = a_memory_limit(draw, costs)
        fuse = draw.choice([1, 1, draw.randint(1, costs.num_layers)])
        brute = BruteForce(costs, within(costs, limit, fuse))
        fused = range(fuse, costs.num_layers + 1)
        found = front_or_nothing(costs, memory_limit=limit, fuse=fuse)
        all_counted = {each.num_stages: longest(costs, each) for each in found}
        assert pareto(all_counted) == brute.front(fused), costs
        others = {each.num_stages: longest(costs, each, least=fuse) for each in found}
        assert others == brute.front(fused, least=fuse), costs
        refused += not found
    assert 20 < refused < 200


@pytest.mark.parametrize("seed", range(30))
def test_the_front_beside_a_fused_stage_equals_brute_force(seed: int) -> None:
    draw = random.Random(100 + seed)
    costs = a_chain(draw)
    limit = a_memory_limit(draw, costs)
    for fuse in range(1, costs.num_layers + 1):
        found = front_or_nothing(costs, memory_limit=limit, fuse=fuse, most_fused=fuse)
        others = {each.num_stages: longest(costs, each, least=fuse) for each in found}
        brute = BruteForce(costs, within(costs, limit, fuse, apart=True))
        assert others == brute.front(range(fuse, fuse + 1), least=fuse)


def within(
    costs: Costs, limit: int | None, fuse: int, *, apart: bool = False
) -> Callable[[range, Phase], bool]:
    """Whether a stage keeps within its shares of a device; nothing does if a layer cannot fit."""
    top = range(costs.num_layers - fuse, costs.num_layers)
    if limit is None:
        return lambda *_: True
    try:
        shares = shares_of(costs, limit, fuse, apart=apart)
    except PlanError:
        return lambda *_: False
    return lambda stage, phase: (apart and stage == top) or shares.holds(stage, phase)


def test_all_stages_fit_into_the_memory_limit_together() -> None:
    draw = random.Random(3)
    for _ in range(60):
        costs = a_chain(draw)
        most = Part()
        for at in range(costs.num_layers):
            most = most.or_more(Part.of(costs, range(at, at + 1), Phase.BACKWARD))
        for limit in (most.twice, 2 * most.twice):
            for partition in front(costs, memory_limit=limit):
                assert partition_bytes(costs, partition) <= limit


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(1, 40))
def test_the_least_limit_of_each_count_is_found_without_trying_all(drops, stages: int) -> None:
    counts = [stages + sum(drops[at:]) for at in range(len(drops))]  # falls as limits rise
    asked = []

    def count(limit: int) -> int:
        asked.append(limit)
        return counts[limit]

    found = _least_limits(list(range(len(counts))), count)
    assert found == sorted((counts.index(each) for each in set(counts)), reverse=True)
    assert len(asked) <= 2 + len(set(counts)) * (1 + log2(len(counts)))


def test_the_front_of_130_layers_costs_little_more_than_its_own_sums() -> None:
    draw = random.Random(5)
    costs = Costs(
        tuple(
            LayerCost(
                forward_seconds=draw.uniform(1, 3),
                backward_seconds=draw.uniform(2, 6),
                weight_bytes=10,
                gradient_bytes=1,
            )
            for _ in range(130)
        ),
        frozenset(range(130)),
    )

    def seconds(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    # Measured: 1.5 of it, with and without a memory limit.
    yardstick = min(seconds(lambda: sum(at % 7 for at in range(1_000_000))) for _ in range(2))
    assert min(seconds(lambda: front(costs)) for _ in range(2)) < 5 * yardstick
    assert min(seconds(lambda: front(costs, memory_limit=900)) for _ in range(2)) < 5 * yardstick
