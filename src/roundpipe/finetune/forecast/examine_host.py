"""Measure the host: its memory, the optimizer on it, and what the system lets us have of both.

The optimizer is measured with the threads that it has in training: most cores beside cards, one
beside devices that compute on the CPU themselves.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roundpipe.device.cores import count_cores, host_threads
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.host_memory import host_memory, huge_pages, is_wsl
from roundpipe.device.probe import CPU_EFFORT, Probe, effort_within
from roundpipe.device.processor import clock, machine_cores
from roundpipe.device.topology import memory_nodes
from roundpipe.optim.adamw import AdamWConfig, adamw_
from roundpipe.optim.build import kernel
from roundpipe.optim.compiled import Kernel
from roundpipe.plan.hosts import host_kind
from roundpipe.report.readings import HostReadings, NodeReadings
from roundpipe.store.pages import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.device.host_memory import HostMemory
    from roundpipe.device.probe import Effort
    from roundpipe.optim.execution import Implementation
    from roundpipe.report.readings import DeviceReadings

HOST_EFFORT = replace(CPU_EFFORT, copy_bytes=256 * 2**20)  # more than caches hold
PARAMETERS = 2**24
_ONE_THREAD = 10e9  # bytes per second that one thread gets of memory, of any machine about


def cores_here() -> frozenset[int]:
    """The cores this process may run on; empty where the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset()


def why_not_compiled() -> str:
    """Why the optimizer runs in plain PyTorch here; empty where it is compiled. May build it."""
    found = kernel()
    return "" if isinstance(found, Kernel) else str(found)


@dataclass(frozen=True)
class HostExamination:
    """How the host is measured; every part can be given, for tests."""

    root: Path = Path("/")
    effort: Effort = HOST_EFFORT
    parameters: int = PARAMETERS
    cores: Callable[[], frozenset[int]] = cores_here
    why_not_compiled: Callable[[], str] = why_not_compiled

    def of(self, free_bytes: int, devices: Sequence[DeviceReadings]) -> HostReadings:
        """Measure the host beside ``devices``."""
        effort = effort_within(self.effort, free_bytes)
        on_cpu = any(device.is_cpu for device in devices)
        ours = self.cores()
        cores = count_cores(ours or range(os.cpu_count() or 1), self.root)
        threads = torch.get_num_threads() if on_cpu else host_threads(cores)
        updating = 1 if on_cpu else threads
        one = _on_host(1, effort, _bandwidth)
        several = one if threads == 1 else _on_host(threads, effort, _bandwidth)
        parameters = min(self.parameters, free_bytes // 100)
        not_compiled = self.why_not_compiled()
        how: Implementation = "chunks" if not_compiled else "auto"
        update = _on_host(updating, effort, lambda probe: update_seconds(probe, parameters, how))
        memory = host_memory(self.root)
        now = clock(self.root)
        return HostReadings(
            threads=threads,
            bandwidth_one_thread=rounded(one),
            bandwidth=rounded(max(one, several)),
            usual_bandwidth=_usual_bandwidth(memory, devices, threads),
            update_seconds=rounded(update),
            update_threads=updating,
            not_compiled=not_compiled,
            machine_bytes=None if memory is None else memory.machine_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            limited_by="" if memory is None else memory.limited_by,
            swapped_bytes=0 if memory is None else memory.swapped_bytes,
            nodes=_nodes(self.root, ours),
            cores=cores,
            machine_cores=machine_cores(self.root),
            clock=None if now is None else (now.may, now.could, now.held_by),
            huge_pages=huge_pages(self.root),
            fresh=rounded(fresh_rate(effort.copy_bytes)),
            is_wsl=is_wsl(self.root),
        )


def update_seconds(probe: Probe, parameters: int, how: Implementation = "auto") -> float:
    """Seconds that our optimizer takes for one of ``parameters``: bf16 weights, fp32 state."""
    master, exp_avg, exp_avg_sq = (torch.full((parameters,), 0.01) for _ in range(3))
    grad = torch.full((parameters,), 1e-3, dtype=torch.bfloat16)
    working: Tensor = torch.empty_like(grad)
    config = AdamWConfig(lr=1e-5)

    def update() -> None:
        adamw_(master, grad, exp_avg, exp_avg_sq, 10, config, out=working, implementation=how)

    return probe.median_seconds(update) / parameters


def fresh_rate(num_bytes: int) -> float:
    """Bytes per second of pages that one thread touches for the first time, as a store's are."""
    block = Block(num_bytes)
    start = time.perf_counter()
    block.tensor.fill_(1)
    return num_bytes / max(time.perf_counter() - start, 1e-9)


def rounded(rate: float) -> float:
    """To four digits: a measurement is not better than that."""
    return float(f"{rate:.4g}")


def _usual_bandwidth(
    memory: HostMemory | None, devices: Sequence[DeviceReadings], threads: int
) -> float | None:
    """What memory of a host like this moves, by as many threads; None on a CPU alone."""
    cards = [device for device in devices if not device.is_cpu]
    if memory is None or not cards:
        return None
    generation = max(device.lanes.generation or 0 for device in cards)
    kind = host_kind(len(cards), memory.machine_bytes, generation)
    return min(kind.bandwidth, threads * _ONE_THREAD)


def _nodes(root: Path, cores: frozenset[int]) -> tuple[NodeReadings, ...]:
    return tuple(
        NodeReadings(
            index=node.index,
            num_bytes=node.num_bytes,
            is_ours=not cores or bool(cores & node.cores),
        )
        for node in memory_nodes(root)
    )


def _on_host(threads: int, effort: Effort, measure: Callable[[Probe], float]) -> float:
    device = CpuDevice("host", threads=threads)
    try:
        return measure(Probe(device, effort))
    finally:
        device.close()


def _bandwidth(probe: Probe) -> float:
    return probe.bandwidth()
