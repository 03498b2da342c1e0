"""How much of a chain of steps each device computes, from the library's own timeline.

    python benchmarks/busy_share.py

Trains the decoder of two_devices.py for ten steps without a pause on two CPU devices of one thread
each, once exactly (staleness 0) and once with weights one step old (staleness 1), and prints a
table in Markdown. The share is of the time from the first compute action of the chain to the end of
its last, ramps included. The optimizer runs on the host, which on this kind of device means on the
same cores, so the time it takes from the devices counts as theirs: a share can be high and the step
slow. Therefore the seconds stand beside it.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
from _decoder import MICROBATCHES, build_batch, build_layers, microbatch_loss
from torch import nn

import roundpipe
from roundpipe.plan.timeline import busy_share

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES = 2
STEPS = 10
WARM_UPS = 3


def chain(staleness: int) -> tuple[dict[str, float], float]:
    """Run one chain; the busy share by compute stream, and seconds a step."""
    pipe = roundpipe.RoundPipe(nn.Sequential(*build_layers()), devices=["cpu"] * DEVICES)
    with pipe:
        run_step = _step_of(pipe, staleness)
        for _ in range(WARM_UPS):
            run_step()
        pipe.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            run_step()
        pipe.synchronize()
        seconds = time.perf_counter() - start
        spans = [span for span in pipe.timeline.spans if span.start >= start]
        return busy_share(spans), seconds / STEPS


def _step_of(pipe: roundpipe.RoundPipe, staleness: int) -> Callable[[], None]:
    tokens, labels = build_batch()
    config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    optimizer = roundpipe.optim.AdamW(pipe.optim_parameters(), lr=1e-4)

    def run_step() -> None:
        pipe.forward_backward(
            input_args=(tokens,), label=labels, loss_fn=microbatch_loss, run_config=config
        )
        pipe.step(optimizer, is_async=staleness == 1)

    return run_step


def main() -> int:
    """Print one row for each staleness."""
    torch.set_num_threads(1)
    devices = " | ".join(f"busy share of device {device}" for device in range(DEVICES))
    lines = [f"| staleness | {devices} | seconds a step |", "|---" * (DEVICES + 2) + "|"]
    for staleness in (0, 1):
        shares, seconds = chain(staleness)
        cells = " | ".join(f"{share:.1%}" for share in shares.values())
        lines.append(f"| {staleness} | {cells} | {seconds:.3f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
