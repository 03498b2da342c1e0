"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _decoder import build_batch, build_layers, microbatch_loss

if TYPE_CHECKING:
    from collections.abc import Callable


def machine_facts() -> dict[str, Any]:
    """Return facts of this machine and this torch; the last is measured, in half a second."""
    torch.set_num_threads(1)
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_process": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "head_in_blocks": head_in_blocks(),
    }


def head_in_blocks(repeats: int = 10) -> float:
    """Return how many blocks' forward and backward the head's and the loss's cost."""
    embedding, block, *_, head = build_layers()
    tokens, labels = (part[:1] for part in build_batch())
    hidden = embedding(tokens).detach().requires_grad_()
    gradient = torch.ones_like(hidden)

    def run_head() -> None:
        microbatch_loss(head(hidden), labels).backward()

    def run_block() -> None:
        block(hidden).backward(gradient)

    return _fastest(run_head, repeats) / _fastest(run_block, repeats)


def _fastest(work: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.is_file() else []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()
