"""``roundpipe doctor``: measure this machine, say what is slow and what it costs.

Imports torch: the command line loads it only when the command runs.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.device.resolve import resolve_devices
from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.examine import Examination, Told, ask_tool
from roundpipe.finetune.forecast.examine_software import SoftwareExamination
from roundpipe.finetune.forecast.machines import machine_text, saved_file, write_machine
from roundpipe.finetune.forecast.reference import Reference
from roundpipe.finetune.settings.parse import parse_argv
from roundpipe.plan.machine_file import machine_mapping
from roundpipe.report.doctor import Level, judge
from roundpipe.report.doctor_text import doctor_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.plan.machine import Machine
    from roundpipe.report.doctor import Finding
    from roundpipe.report.readings import Readings

_KEYS = ("devices", "output", "save", "json")


@dataclass(frozen=True)
class Wish:
    """What the command was asked for."""

    devices: Any = "auto"
    output: Path | None = None
    save: bool = False
    as_json: bool = False


def read_wish(arguments: Sequence[str]) -> Wish:
    """The wish of a command line of ``key=value``, ``--key value`` and bare ``--key``."""
    file, values = parse_argv(arguments, known=_KEYS)
    if file is not None:
        raise ConfigError(f"doctor takes no file: {file}\nhint: devices=cpu, --output {file}")
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1) or [", ".join(_KEYS)]
            raise ConfigError(f"unknown key: {key}\nhint: {near[0]}")
    for key in ("save", "json"):
        if not isinstance(values.get(key, False), bool):
            raise ConfigError(f"neither true nor false: {key}={values[key]}\nhint: --{key}")
    output = values.get("output")
    if output is not None and (isinstance(output, bool) or not str(output)):
        raise ConfigError("output names no file\nhint: --output machine.yaml")
    devices = values.get("devices")
    return Wish(
        devices="auto" if devices is None else devices,
        output=None if output is None else Path(str(output)),
        save=values.get("save", False),
        as_json=values.get("json", False),
    )


def run(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    how: Examination | None = None,
    told: Told | None = None,
    price: Callable[[Machine], Reference] = Reference,
) -> int:
    """Run the command; the exit code is 2 where a device cannot be trusted.

    ``price`` makes the speed of a reference model on machines like the measured one.
    """
    wish = read_wish(arguments)
    told = told or ask_tool()
    examination = how or Examination(
        software=SoftwareExamination(environment),
        say=lambda what: typer.echo(f"{what} …", err=True),
    )
    devices = resolve_devices(wish.devices, environment=environment)
    try:
        readings, machine = examination.of(devices, told)
    finally:
        for device in devices:
            device.close()
    reference = price(machine)
    findings = judge(readings, machine, reference, largest=reference.largest)
    name = reference.name if any(finding.price for finding in findings) else ""
    text = machine_text(machine, json.loads(json.dumps(readings.plain())))
    files = [file for file in (wish.output, saved_file(environment) if wish.save else None) if file]
    try:
        if wish.as_json:
            typer.echo(json.dumps(_as_values(readings, machine, findings, name), indent=2))
        else:
            for line in doctor_lines(readings, machine, findings, reference=name):
                typer.echo(line)
            typer.echo("")
    finally:  # what took minutes is told where no file takes it, and kept where it cannot be told
        for file in files:
            write_machine(file, text)
    if not wish.as_json:
        for file in files:
            typer.echo(f"machine file: {file}")
        if not files:
            typer.echo("machine file (--output FILE writes it; --save lets later plans use it):")
            typer.echo(machine_text(machine).rstrip())
    return 2 if any(finding.level is Level.BROKEN for finding in findings) else 0


def _as_values(
    readings: Readings, machine: Machine, findings: Sequence[Finding], reference: str
) -> dict[str, Any]:
    return {
        "reference": reference or None,
        "machine": machine_mapping(machine),
        "measured": readings.plain(),
        "findings": [
            {
                "level": finding.level.value,
                "text": finding.text,
                "price": finding.price or None,
                "hint": finding.hint or None,
            }
            for finding in findings
        ],
    }
