"""Judge a measured machine: what is broken, what is slow, and what each thing costs.

Every finding is one sentence. Its price is the speed of a reference model now and with the thing
put right, asked of a function that plays the machine; without one, findings have no price. What
costs nothing to the reference model is still said, with that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.report.doctor_devices import device_findings
from roundpipe.report.finding import Case, Finding, Level, Speed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.plan.machine import Machine
    from roundpipe.report.readings import Readings

__all__ = ["Finding", "Level", "Speed", "judge"]

_SHARED_LINKS = 0.8  # of the sum of the links
_SLOW_UPDATE = 0.6  # of host bandwidth
_UPDATE_BYTES = 28  # that update and publish of one parameter move
_REFERENCE_PARAMETERS = 8e9


def judge(readings: Readings, machine: Machine, speed: Speed | None = None) -> list[Finding]:
    """Everything worth saying of ``readings``, the worst first.

    ``machine`` is made of the readings, device by device in the same order. ``speed`` plays a
    reference model on a machine.
    """
    case = Case(readings, machine, speed)
    findings = [
        finding for rule in (device_findings, _of_shared_links, _of_host) for finding in rule(case)
    ]
    findings += [Finding(Level.NOTE, sentence) for sentence in readings.unknown]
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _of_shared_links(case: Case) -> Iterator[Finding]:
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


def _of_host(case: Case) -> Iterator[Finding]:
    host = case.readings.host
    update = _UPDATE_BYTES / host.update_seconds
    seconds = host.update_seconds * _REFERENCE_PARAMETERS
    better = replace(case.machine, host=replace(case.machine.host, update_bandwidth=None))
    is_slow = update < _SLOW_UPDATE * host.bandwidth
    yield Finding(
        Level.NOTE,
        f"the optimizer takes {host.update_seconds * 1e9:.3g} ns per parameter "
        f"({seconds:.3g} s a step for all of an 8B model), {write_rate(update)} of the "
        f"{write_rate(host.bandwidth)} of host memory",
        case.price(better, "if it kept up with memory") if is_slow else "",
    )
    if host.limited_by and host.usable_bytes is not None and host.machine_bytes is not None:
        yield Finding(
            Level.NOTE,
            f"{write_bytes(host.usable_bytes)} of {write_bytes(host.machine_bytes)} of host memory "
            f"may be used, by {host.limited_by}",
        )
    if all(device.is_cpu for device in case.readings.devices):
        yield Finding(Level.NOTE, "there is no card: training runs on the CPU")
