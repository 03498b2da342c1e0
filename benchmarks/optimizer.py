"""How fast the host updates weights, against PyTorch's own optimizers in the same run.

The job: a bf16 gradient in, fp32 state in place, bf16 working weights out. ``compiled`` and
``fallback`` (chunks of plain PyTorch) do all of it in one pass. Beside them: ``fused``, torch's
fused AdamW alone, given an fp32 gradient for nothing and publishing nothing; ``three_pass``, what
it takes to do the whole job with it (cast the gradient, step, cast the weights); and ``foreach``
alone. Variants take turns, so that a busy moment hits all; medians are reported. All work on the
same memory. Then other rules and forms of state, and a plain copy for scale.

    python benchmarks/optimizer.py --json optimizer.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import roundpipe.optim
from roundpipe.optim.adamw import AdamWConfig, adamw_
from roundpipe.optim.execution import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]

CONFIG = AdamWConfig(lr=1e-4, weight_decay=0.01)
# Bytes that one update of one parameter must move at least, by row.
BYTES = {
    "compiled": 28,  # master and moments read and written, gradient read, weight written
    "fallback": 28,
    "fused": 28,  # an fp32 gradient instead, and no weight
    "three_pass": 40,
    "adam": 28,
    "sgd_momentum": 20,
    "bf16_state": 20,
    "int8_state": 16,
    "least_memory": 14,  # bf16 weight and remainder, 8-bit moments
    "copy": 8,
}
BARS = {
    "compiled_of_fused": ("compiled", "fused", "<=", 1.15),
    "three_pass_of_compiled": ("three_pass", "compiled", ">=", 1.6),
    "fallback_of_three_pass": ("fallback", "three_pass", "<=", 1.1),
    "foreach_of_fallback": ("foreach", "fallback", ">=", 2.5),
}


class Tensors:
    """One parameter's fp32 master and moments, an fp32 and a bf16 gradient, bf16 weights."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.grad = torch.randn(numel)
        self.grad16 = self.grad.bfloat16()
        self.master = torch.randn(numel)
        self.working = self.master.bfloat16()
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)


def ours(t: Tensors, implementation: Any) -> Step:
    def step() -> None:
        adamw_(t.master, t.grad16, t.exp_avg, t.exp_avg_sq, 10, CONFIG, out=t.working,
               implementation=implementation)  # fmt: skip

    return step


def of_torch(t: Tensors, **kind: bool) -> Step:
    parameter = nn.Parameter(t.master)
    optimizer = torch.optim.AdamW([parameter], lr=CONFIG.lr, weight_decay=0.01, **kind)
    state = {"step": torch.tensor(9.0), "exp_avg": t.exp_avg, "exp_avg_sq": t.exp_avg_sq}
    optimizer.state[parameter] = state
    parameter.grad = t.grad
    return optimizer.step


def three_passes(t: Tensors) -> Step:
    fused = of_torch(t, fused=True)

    def step() -> None:
        t.grad.copy_(t.grad16)
        fused()
        t.working.copy_(t.master)

    return step


def by_optimizer(
    t: Tensors, weight: Tensor, *, make: Any = roundpipe.optim.AdamW, **options: Any
) -> Step:
    """An optimizer of ours with state of its own; ``out`` unless the weight itself is bf16."""
    parameter = nn.Parameter(weight)
    optimizer = make([parameter], lr=1e-4, **options)
    out = None if weight.dtype == torch.bfloat16 else t.working

    def step() -> None:
        optimizer.update_(parameter, t.grad16, optimizer.hyperparameters(), out=out)

    return step


def rows(t: Tensors) -> dict[str, Step]:
    compiled = resolve("auto") is not None
    return {
        **({"compiled": ours(t, "compiled")} if compiled else {}),
        "fused": of_torch(t, fused=True),
        "three_pass": three_passes(t),
        "fallback": ours(t, "chunks"),
        "foreach": of_torch(t, foreach=True),
        "adam": by_optimizer(t, t.master, make=roundpipe.optim.Adam),
        "sgd_momentum": by_optimizer(t, t.master, make=roundpipe.optim.SGD, momentum=0.9),
        "bf16_state": by_optimizer(t, t.master, state_dtype="bf16"),
        "int8_state": by_optimizer(t, t.master, state_dtype="int8"),
        "least_memory": by_optimizer(t, t.working, state_dtype="int8"),
        "copy": lambda: t.grad.copy_(t.master),
    }


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(numel: int, turns: int) -> dict[str, float]:
    """Median seconds of one update of ``numel`` parameters, by row."""
    steps = rows(Tensors(numel))
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step))
    return {name: median(values) for name, values in seconds.items()}


def judge(seconds: dict[str, float]) -> tuple[dict[str, float], dict[str, bool]]:
    """The ratios that have a bar, and whether each keeps it."""
    there = {key: bar for key, bar in BARS.items() if bar[0] in seconds and bar[1] in seconds}
    ratios = {key: seconds[a] / seconds[b] for key, (a, b, _, _) in there.items()}
    kept = {
        key: ratios[key] <= bound if sign == "<=" else ratios[key] >= bound
        for key, (_, _, sign, bound) in there.items()
    }
    return ratios, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100, help="millions (100)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    numel = int(options.parameters * 1e6)
    torch.set_num_threads(options.threads)
    seconds = measure(numel, options.turns)
    ratios, kept = judge(seconds)
    rates = {name: BYTES[name] * numel / s / 1e9 for name, s in seconds.items() if name in BYTES}
    print(f"{options.parameters:g} M parameters, {options.threads} threads, {options.turns} turns")
    for name, value in seconds.items():
        rate = f" · {rates[name]:.0f} GB/s" if name in rates else ""
        print(f"  {name:13} {value:.3f} s{rate}")
    for key, (_, _, sign, bound) in BARS.items():
        if key in ratios:
            print(f"  {key} {ratios[key]:.2f} {sign} {bound}{'' if kept[key] else '  MISSED'}")
    if options.json:
        figures = {
            "parameters": numel,
            "threads": options.threads,
            "turns": options.turns,
            **{f"{name}_seconds": value for name, value in seconds.items()},
            "gigabytes_per_second": rates,
            "ratios": ratios,
            "bars": {key: f"{sign} {bound}" for key, (_, _, sign, bound) in BARS.items()},
            "kept": kept,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
