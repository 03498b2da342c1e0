"""How fast the host updates weights: our one pass against PyTorch's own AdamW.

All variants start from a bf16 gradient and end with bf16 working weights over fp32 state, because
that is the job. ``chunks`` does it in one pass through cache; the others cast the gradient, step,
and cast the weights. Variants take turns, so that a busy moment hits all; the median is printed.

    python benchmarks/optimizer.py --parameters 100 --json optimizer.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roundpipe.optim.adamw import AdamWConfig, adamw_

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = AdamWConfig(lr=1e-4, weight_decay=0.01)
BYTES_IN_ONE_PASS = 28  # master and moments read and written, gradient read, weight written


@dataclass
class State:
    """One parameter of bf16 working weights with its fp32 master and moments."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    working: Tensor


def make_state(numel: int) -> State:
    torch.manual_seed(0)
    grad, master = torch.randn(numel).bfloat16(), torch.randn(numel)
    return State(master, torch.zeros(numel), torch.zeros(numel), grad, master.bfloat16())


def chunks(s: State) -> Callable[[], None]:
    def step() -> None:
        adamw_(s.master, s.grad, s.exp_avg, s.exp_avg_sq, 1, CONFIG, out=s.working)

    return step


def of_torch(s: State, scratch: Tensor, **kind: bool) -> Callable[[], None]:
    parameter = nn.Parameter(s.master)
    optimizer = torch.optim.AdamW([parameter], lr=CONFIG.lr, weight_decay=0.01, **kind)
    # The same moments for all: four states of the whole would not fit beside each other.
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": s.exp_avg,
        "exp_avg_sq": s.exp_avg_sq,
    }

    def step() -> None:
        parameter.grad = scratch.copy_(s.grad)
        optimizer.step()
        s.working.copy_(s.master)

    return step


def seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(numel: int, turns: int) -> dict[str, float]:
    """Median seconds of one update of ``numel`` parameters, by variant."""
    state, scratch = make_state(numel), torch.empty(numel)
    variants = {
        "chunks": chunks(state),
        "fused": of_torch(state, scratch, fused=True),
        "foreach": of_torch(state, scratch, foreach=True),
        "for_loop": of_torch(state, scratch, foreach=False, fused=False),
    }
    for step in variants.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, step in variants.items():
            seconds[name].append(seconds_of(step))
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100, help="millions (100)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    numel = int(options.parameters * 1e6)
    seconds = measure(numel, options.turns)
    print(f"{options.parameters:g} M parameters, {torch.get_num_threads()} threads, seconds:")
    for name, value in seconds.items():
        rate = f" · {BYTES_IN_ONE_PASS * numel / value / 1e9:.0f} GB/s" if name == "chunks" else ""
        print(f"  {name:9} {value:.3f} · {value / seconds['chunks']:.2f} of chunks{rate}")
    if options.json:
        figures = {"parameters": numel, "threads": torch.get_num_threads(), "seconds": seconds}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
