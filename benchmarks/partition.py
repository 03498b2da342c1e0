"""How long the partitioner takes: the front of a chain, with and without a memory limit.

Chains of equal layers under a head are what models mostly are; measured times differ from layer to
layer, so that no two intervals take equally long and every one of them is a limit worth trying.
Seconds are of one core's processor time, the least of a few runs.

    python benchmarks/partition.py --layers 28 64 94 130
"""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.partition import front, fused_choices

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 10**9


def chain(num_layers: int, *, spread: float, seed: int = 0) -> Costs:
    """Layers of an 8B model and its head on a 24 GB card, times off by up to ``spread``."""
    draw = random.Random(seed)

    def layer(forward: float, backward: float, parameters: float) -> LayerCost:
        off = 1 + draw.uniform(-spread, spread)
        return LayerCost(
            forward_seconds=forward * off,
            backward_seconds=backward * off,
            weight_bytes=round(2 * parameters),
            gradient_bytes=round(4 * parameters),
            boundary_bytes=67 * 10**6,
            activation_bytes=round(1.5 * GB),
            peak_bytes=GB // 2,
        )

    blocks = [layer(0.0185, 0.0412, 218e6) for _ in range(num_layers - 1)]
    return Costs((*blocks, layer(0.0372, 0.0745, 525e6)), frozenset(range(num_layers)))


def seconds(work: Callable[[], object], *, runs: int) -> float:
    """The least processor time of ``work``."""
    best = float("inf")
    for _ in range(runs):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def line(num_layers: int, name: str, spread: float, runs: int) -> str:
    """What one chain took."""
    costs, limit = chain(num_layers, spread=spread), 24 * GB
    free = seconds(lambda: front(costs), runs=runs)
    tight = seconds(lambda: front(costs, memory_limit=limit), runs=runs)
    choices = seconds(lambda: fused_choices(costs, limit), runs=runs)
    count = len(front(costs, memory_limit=limit))
    fused = " ".join(map(str, fused_choices(costs, limit)))
    return f"{num_layers:6}  {name:8} {free:9.4f} {tight:15.4f} {count:11} {choices:16.4f}  {fused}"


def main() -> None:
    """Print one line for each number of layers and kind of chain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[28, 64, 94, 130])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    print("layers  times      front s  within 24 GB s  partitions  fused_choices s  fused")
    for num_layers in args.layers:
        for name, spread in (("equal", 0.0), ("measured", 0.2)):
            print(line(num_layers, name, spread, args.runs))


if __name__ == "__main__":
    main()
