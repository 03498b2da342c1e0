"""What moving a layer costs the host thread that issues it, whatever the copy itself takes.

    python benchmarks/transfers.py [--tensors N] [--repeats N] [--json FILE]

A layer of 400 tensors, each of a few bytes, so that copying costs next to nothing: milliseconds of
processor time of the issuing thread, medians. Exits with 1 where issuing an upload takes more than
0.05 ms or binding a shell more than 0.5 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import roundpipe
from roundpipe.engine.transfer import download_gradients, upload_weights
from roundpipe.optim import AdamW
from roundpipe.plan.actions import Action, Op

if TYPE_CHECKING:
    from collections.abc import Callable

BARS = {"upload_ms": 0.05, "bind_ms": 0.5}


class Many(nn.Module):
    """A layer of many small parameters."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(torch.ones(8, dtype=dtype)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use each of them."""
        return x + torch.stack(list(self.parts)).sum(0)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of this thread's processor time, the median."""
    taken = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        run()
        taken.append((time.thread_time_ns() - begin) / 1e6)
    return statistics.median(taken)


def measure(tensors: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Times for one layer of ``tensors`` parameters, issued by this thread on idle devices."""
    layers = [Many(tensors, dtype) for _ in range(3)]
    with roundpipe.RoundPipe(nn.Sequential(*layers), devices="cpu") as pipe:
        optimizer = AdamW(pipe.optim_parameters(), lr=1e-3)
        x = torch.ones(2, 8, dtype=dtype)
        pipe.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)
        pipe.step(optimizer)
        run = pipe._chain._last
        pipe.synchronize()
        assert run is not None
        engine, schedule = pipe._engine, run.program.schedule
        model, visit = engine.models[0], schedule.visits[-1]
        slot, sums = run.prints.slot[visit.number], run.prints.sums[visit.number]
        upload = Action(Op.UPLOAD, visit.number, chunk=0)
        download = Action(Op.DOWNLOAD, visit.number, chunk=0)
        run.received = {(v.number, n): [] for v in schedule.visits for n in v.layers}
        per_layer = 1 / len(visit.layers)
        return {
            "upload_ms": median_ms(lambda: upload_weights(run, model, upload), repeats) * per_layer,
            "download_ms": per_layer
            * median_ms(
                lambda: download_gradients(run, model, download, engine._partials), repeats
            ),
            "bind_ms": median_ms(lambda: model.enter(visit, slot), repeats) * per_layer,
            "collect_ms": median_ms(lambda: model.collect(visit, sums), repeats) * per_layer,
        }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        str(dtype).removeprefix("torch."): measure(given.tensors, given.repeats, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for dtype, times in results.items():
        words = "  ".join(f"{name.removesuffix('_ms')} {ms:.4f} ms" for name, ms in times.items())
        print(f"{given.tensors} tensors {dtype:9} {words}")
    if given.json:
        found = {"tensors": given.tensors, "bars": BARS, **results}
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(times[name] > bar for times in results.values() for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
