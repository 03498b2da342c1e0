"""What `roundpipe doctor` shows: what was measured, a line a device, then the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.report.doctor import Level
from roundpipe.report.forecast_text import counted, duration_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.machine import Machine
    from roundpipe.report.doctor import Finding
    from roundpipe.report.readings import (
        CopyRates,
        DeviceReadings,
        DiskReadings,
        HostReadings,
        Readings,
    )

_INDENT = " " * 10


def doctor_lines(
    readings: Readings, machine: Machine, findings: Sequence[Finding], *, reference: str = ""
) -> list[str]:
    """The lines; ``reference`` says which model the prices are of."""
    disk = machine.host.disk_bytes
    head = [machine.text, f"{write_bytes(machine.host.memory_bytes)} of host memory free"]
    if disk is not None:
        head.append(f"{write_bytes(disk)} of disk free")
    width = max(len(device.name) for device in readings.devices)
    lines = [" · ".join(head), ""]
    for device in readings.devices:
        lines += [f"  {part}" for part in _device(device, max(width, 4))]
    told = [("host", line) for line in _host(readings.host)]
    told += [("disk", _disk(disk)) for disk in readings.disks]
    if readings.software.torch:
        told.append(("runs", f"Python {readings.software.python}, torch {readings.software.torch}"))
    lines += [f"  {name:<{max(width, 4)}}  {line}" for name, line in told]
    if readings.all_links is not None:
        lines.append(f"  all links at once {write_rate(readings.all_links)} up")
    lines.append("")
    if all(finding.level in (Level.NOTE, Level.UNKNOWN) for finding in findings):
        lines.append("nothing is broken, missing or slow")
    for finding in findings:
        lines.append(f"{finding.level.value:<9} {finding.text}")
        if finding.price:
            lines.append(f"{_INDENT}{finding.price}")
        if finding.hint:
            lines.append(f"{_INDENT}hint: {finding.hint}")
    if reference and any(finding.price for finding in findings):
        lines += ["", f"tokens/s are of the reference model: {reference}"]
    return lines


def _device(device: DeviceReadings, width: int) -> list[str]:
    rates = " · ".join(f"{key} {rate / 1e12:.3g}" for key, rate in device.flops.items())
    free = f" · {write_bytes(device.free_bytes)} of {write_bytes(device.total_bytes)} free"
    intact = "comes back intact" if device.is_intact else "COMES BACK CHANGED"
    lines = [
        f"{device.card}{'' if device.is_cpu else free} · memory {write_rate(device.bandwidth)}",
        f"{rates} TFLOP/s",
        f"copies {_copies(device.pinned)} · what is sent {intact}",
    ]
    if device.pageable is not None:
        lines.append(f"pageable {_copies(device.pageable)}")
    names = [device.name, *[""] * (len(lines) - 1)]
    return [f"{name:<{width}}  {line}" for name, line in zip(names, lines, strict=True)]


def _copies(rates: CopyRates) -> str:
    return (
        f"{write_rate(rates.up)} up, {write_rate(rates.down)} down, both at once "
        f"{rates.duplex:.0%} of each"
    )


def _host(host: HostReadings) -> list[str]:
    one = f" ({write_rate(host.bandwidth_one_thread)} with one)" if host.threads > 1 else ""
    nodes = f" · {len(host.nodes)} memory nodes" if len(host.nodes) > 1 else ""
    fresh = "" if host.fresh is None else f" · fresh {write_rate(host.fresh)}"
    how = "in PyTorch" if host.not_compiled else "compiled"
    updating = host.update_threads or host.threads
    return [
        f"memory {write_rate(host.bandwidth)} with {_threads(host.threads)}{one}{fresh}{nodes}",
        f"optimizer {how}, {host.update_seconds * 1e9:.3g} ns per parameter with "
        f"{_threads(updating)}: {duration_text(host.update_seconds * 8e9)} a step for all of an 8B "
        "model",
    ]


def _threads(number: int) -> str:
    return counted(number, "thread", "threads")


def _disk(disk: DiskReadings) -> str:
    free = (
        "free space unknown" if disk.free_bytes is None else f"{write_bytes(disk.free_bytes)} free"
    )
    rates = [
        f"{verb} at {write_rate(rate)}"
        for verb, rate in (("written", disk.write), ("read", disk.read))
        if rate is not None
    ]
    return " · ".join([f"{disk.used_for}: {disk.folder}", free, *rates])
