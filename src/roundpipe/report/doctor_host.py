"""What doctor says of the host: its memory, its processor, the optimizer that runs on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.report.finding import Case, Finding, Level
from roundpipe.report.forecast_text import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARED_LINKS = 0.8  # of the sum of the links
_SLOW_UPDATE = 0.6  # of host bandwidth
_SLOW_MEMORY = 0.5  # of what hosts like it move
_LOW_CLOCK = 0.9
_SWAPPED = 10**9  # bytes; less is what nobody asks for
# 100 M parameters on two cores (docs/acceptance.md): in chunks of PyTorch, and compiled.
_COMPILED = 0.112 / 0.064
# Fresh memory in large pages beside small ones: 6.6 and 2.4 GB/s on one core (docs/log.md).
_LARGE_PAGES = 2.7
_PARAMETERS = 8e9  # of the model that what is no matter of tokens is told of
_STATE = 16  # host bytes of a parameter in full fine-tuning
_ISSUING = 2  # cores for what is not the optimizer's


def host_findings(case: Case) -> Iterator[Finding]:
    """All rules, one after another."""
    for rule in (
        _shared_links,
        _optimizer,
        _cores,
        _slow_memory,
        _clock,
        _swapped,
        _limited,
        _pages,
    ):
        yield from rule(case)


def _shared_links(case: Case) -> Iterator[Finding]:
    together = case.readings.all_links
    if together is None:
        return
    alone = sum(device.pinned.up for device in case.readings.devices if not device.is_cpu)
    if together < _SHARED_LINKS * alone:
        better = replace(case.machine, link_cap=None)
        yield Finding(
            Level.SLOW,
            f"all links at once move {write_rate(together)} up, one by one {write_rate(alone)}: "
            "they share something",
            case.price(better, "if they did not"),
            "a PCIe switch, one root complex, or host memory with empty channels",
        )


def _optimizer(case: Case) -> Iterator[Finding]:
    """Not compiled is said first: it is what makes it slow."""
    host, rate = case.readings.host, case.update_rate
    whole = host.update_seconds * _PARAMETERS
    each = f"{host.update_seconds * 1e9:.3g} ns per parameter"
    if host.not_compiled:
        yield Finding(
            Level.SLOW,
            f"the optimizer is not compiled, {each}: {host.not_compiled}",
            _and(
                case.price(case.with_updates(rate * _COMPILED), "compiled"),
                f"a step for all of an 8B model updates for {duration_text(whole)}, about "
                f"{duration_text(whole / _COMPILED)} compiled",
            ),
            "a C++ compiler on the PATH: apt install g++, dnf install gcc-c++, or conda install "
            "cxx-compiler",
        )
    elif not case.on_cpu and rate < _SLOW_UPDATE * host.bandwidth:
        yield Finding(
            Level.SLOW,
            f"the optimizer takes {each} with {host.update_threads or host.threads} threads, "
            f"{write_rate(rate)} of the {write_rate(host.bandwidth)} of host memory",
            case.price(case.with_updates(None), "if it kept up with memory"),
            "more cores for this process, or optim_state_dtype=int8, which moves fewer bytes",
        )


def _and(*prices: str) -> str:
    return "; ".join(filter(None, prices))


def _cores(case: Case) -> Iterator[Finding]:
    """Fewer than the machine has, or than its devices need."""
    host = case.readings.host
    if host.cores is None:
        return
    cards = sum(not device.is_cpu for device in case.readings.devices)
    is_given_less = host.machine_cores is not None and host.cores < host.machine_cores
    if is_given_less:
        assert host.machine_cores is not None
        yield Finding(
            Level.NOTE,
            f"this process may use {host.cores} of {host.machine_cores} cores",
            case.price(case.with_cores(host.machine_cores / host.cores), "at most with all"),
            "the CPU limit of the container or job (--cpus, taskset, cpu.max)",
        )
    elif cards and host.cores < cards + _ISSUING:
        needed = cards + _ISSUING
        yield Finding(
            Level.SLOW,
            f"{host.cores} cores for {cards} cards: a thread for each card's work, and the "
            f"optimizer beside them, want {needed}",
            case.price(case.with_cores(needed / host.cores), f"at most with {needed}"),
        )


def _slow_memory(case: Case) -> Iterator[Finding]:
    host = case.readings.host
    usual = host.usual_bandwidth
    if usual is not None and host.bandwidth < _SLOW_MEMORY * usual:
        better = replace(case.machine, host=replace(case.machine.host, bandwidth=usual))
        yield Finding(
            Level.SLOW,
            f"host memory moves {write_rate(host.bandwidth)} with {host.threads} threads, where "
            f"hosts like it move {write_rate(usual)}",
            case.price(better, f"with {write_rate(usual)}"),
            "empty memory channels (dmidecode -t memory), or other processes at work",
        )


def _clock(case: Case) -> Iterator[Finding]:
    if case.readings.host.clock is None:
        return
    may, could, by = case.readings.host.clock
    if may < _LOW_CLOCK * could:
        yield Finding(
            Level.SLOW,
            f"the processor may run at {may / 1e9:.3g} of {could / 1e9:.3g} GHz, by {by}",
            f"issuing work, and updates of what lies in caches, take up to {could / may:.2g} times "
            "as long",
            "cpupower frequency-set --governor performance --max "
            f"{could / 1e6:.0f}MHz (as root)",
        )  # fmt: skip


def _swapped(case: Case) -> Iterator[Finding]:
    swapped, disks = case.readings.host.swapped_bytes, case.readings.disks
    if swapped < _SWAPPED:
        return
    read = next((disk.read for disk in disks if disk.read is not None), None)
    price = "whoever asks for it back waits for the disk"
    if read is not None:
        memory = duration_text(swapped / case.readings.host.bandwidth)
        price = f"to ask for it back takes {duration_text(swapped / read)} in place of {memory}"
    yield Finding(
        Level.NOTE,
        f"{write_bytes(swapped)} of host memory have been swapped out to the disk",
        price,
        "end what holds them; a run's own memory is better bounded with host_memory_limit",
    )


def _limited(case: Case) -> Iterator[Finding]:
    host = case.readings.host
    if host.usable_bytes is None or host.machine_bytes is None:
        return
    if host.is_wsl:
        yield Finding(
            Level.NOTE,
            f"this is WSL, to which Windows gives {write_bytes(host.machine_bytes)} of memory, "
            "half of its own where nothing else is said",
            case.price_of_memory(host.machine_bytes, "with twice as much"),
            "[wsl2] memory=…GB in .wslconfig of the Windows user, then wsl --shutdown",
        )
    elif host.limited_by and host.usable_bytes < host.machine_bytes:
        yield Finding(
            Level.NOTE,
            f"{write_bytes(host.usable_bytes)} of {write_bytes(host.machine_bytes)} of host memory "
            f"may be used, by {host.limited_by}",
            case.price_of_memory(host.machine_bytes - host.usable_bytes, "with all of it"),
            "the memory limit of the container or job (--memory, memory.max)",
        )


def _pages(case: Case) -> Iterator[Finding]:
    host = case.readings.host
    if host.huge_pages != "never" or host.fresh is None:
        return
    state = _PARAMETERS * _STATE
    now = duration_text(state / host.fresh)
    then = duration_text(state / host.fresh / _LARGE_PAGES)
    yield Finding(
        Level.NOTE,
        f"the kernel gives no large pages (transparent_hugepage is never): fresh memory comes at "
        f"{write_rate(host.fresh)}",
        f"the start of an 8B model in full fine-tuning ({write_bytes(state)}) waits {now} for it; "
        f"about {then} with large pages, which came {_LARGE_PAGES:.2g} times as fast where both "
        "were tried",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
    )
