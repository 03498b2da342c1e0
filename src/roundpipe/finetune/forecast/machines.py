"""Machines that come from files: what ``machine=`` may be, and the one that doctor has saved.

machine: 8x4090,512GB        composed from the table
machine: lab.yaml            a machine file, or its content in place
(none)                       this machine; with the rates that doctor measured, if it has
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.parse import read_file
from roundpipe.plan.machine_file import machine_mapping, machine_of
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from roundpipe.device.resolve import DeviceSpec
    from roundpipe.plan.machine import Machine

_SUFFIXES = (".yaml", ".yml", ".json")


def load_machine(
    value: str | Mapping[str, Any] | None = None,
    *,
    devices: DeviceSpec = "auto",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Machine:
    """The machine that a config's ``machine`` means; None: this one, with ``devices``.

    ``folder``: where a run would write, for the disk. Raises ConfigError. Only for this machine is
    torch imported.
    """
    if isinstance(value, Mapping):
        return machine_of(value)
    if value is not None:
        is_file = value.lower().endswith(_SUFFIXES)
        return machine_of(read_file(value)) if is_file else parse_machine(value)
    from roundpipe.device.survey import Place, survey  # noqa: PLC0415, torch

    return survey(
        devices,
        environment=environment,
        saved=saved_machine(environment or {}),
        place=Place(folder=folder or Path()),
    )


def saved_file(environment: Mapping[str, str]) -> Path:
    """Where doctor saves this user's machine."""
    given = environment.get("XDG_CONFIG_HOME") or environment.get("APPDATA")
    return (Path(given) if given else Path.home() / ".config") / "roundpipe" / "machine.yaml"


def saved_machine(environment: Mapping[str, str]) -> Machine | None:
    """The machine that doctor has saved, or None; raises ConfigError where it cannot be read."""
    file = saved_file(environment)
    if not file.is_file():
        return None
    try:
        return machine_of(read_file(str(file)))
    except ConfigError as problem:
        raise ConfigError(
            f"cannot use the saved machine file: {file}: {str(problem).splitlines()[0]}"
            "\nhint: roundpipe doctor --save writes it anew"
        ) from problem


def machine_text(machine: Machine, measured: Mapping[str, Any] | None = None) -> str:
    """The content of a machine file; ``measured`` is kept beside it for people."""
    mapping = machine_mapping(machine)
    if measured is not None:
        mapping["measured"] = measured
    return yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True, width=100)


def write_machine(file: Path, text: str) -> None:
    """Write a machine file, its folder too. Raises ConfigError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as problem:
        raise ConfigError(
            f"cannot write the machine file: {file}: {(problem.strerror or 'error').lower()}"
            "\nhint: --output FILE in a folder of yours"
        ) from problem
