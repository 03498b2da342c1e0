"""Judge a measured machine: what is broken, missing or slow, and what each thing costs.

Every finding is one sentence. Its price is the speed of a reference model now and with the thing
put right, asked of a function that plays the machine, or in words and numbers where speed is not
what it costs. What costs nothing to the reference model is still said, with that. What could not be
found out has no price.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.report.doctor_devices import device_findings
from roundpipe.report.doctor_host import host_findings
from roundpipe.report.doctor_software import software_findings
from roundpipe.report.finding import Case, Finding, Largest, Level, Speed

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine
    from roundpipe.report.readings import Readings

__all__ = ["Finding", "Level", "Speed", "judge"]


def judge(
    readings: Readings,
    machine: Machine,
    speed: Speed | None = None,
    *,
    largest: Largest | None = None,
) -> list[Finding]:
    """Everything worth saying of ``readings``, the worst first.

    ``machine`` is made of the readings, device by device in the same order. ``speed`` plays a
    reference model on a machine; ``largest`` names the largest one that a host's memory holds.
    """
    case = Case(readings, machine, speed, largest)
    findings = [
        finding
        for rule in (device_findings, host_findings, software_findings)
        for finding in rule(case)
    ]
    findings += [Finding(Level.UNKNOWN, sentence) for sentence in readings.unknown]
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))
