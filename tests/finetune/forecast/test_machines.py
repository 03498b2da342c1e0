"""Machines from files, and the one that doctor saved."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.machines import (
    load_machine,
    machine_text,
    saved_file,
    saved_machine,
    write_machine,
)
from roundpipe.plan.machine_file import machine_mapping
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from pathlib import Path


def test_a_machine_is_a_text_a_file_or_a_mapping(tmp_path: Path) -> None:
    machine = parse_machine("2x4090+1x3060,128GB,disk=1TB")
    (tmp_path / "lab.yaml").write_text(machine_text(machine))
    (tmp_path / "lab.json").write_text(json.dumps(machine_mapping(machine)))
    assert load_machine("2x4090+1x3060,128GB,disk=1TB") == machine
    assert load_machine(str(tmp_path / "lab.yaml")) == machine
    assert load_machine(str(tmp_path / "lab.json")) == machine
    assert load_machine(machine_mapping(machine)) == machine


def test_what_was_measured_is_kept_beside_and_not_read(tmp_path: Path) -> None:
    machine = parse_machine("1x4090,64GB")
    text = machine_text(machine, {"devices": [{"name": "cuda:0", "pinned": None}]})
    assert "cuda:0" in text
    write_machine(tmp_path / "new" / "lab.yaml", text)
    assert load_machine(str(tmp_path / "new" / "lab.yaml")) == machine


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_machine(str(tmp_path / "lab.yaml"))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot write the machine file"):
        write_machine(tmp_path / "taken" / "machine.yaml", "")


def test_this_machine_uses_what_was_measured_on_it(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    before = load_machine(devices="cpu*2", environment=environment, folder=tmp_path)
    assert any("by data sheet" in note for note in before.notes)
    fast = replace(before, cards=tuple(replace(c, flops={"fp32": 7e9}) for c in before.cards))
    write_machine(saved_file(environment), machine_text(fast))
    after = load_machine(devices="cpu*2", environment=environment, folder=tmp_path)
    assert after.cards[0].flops == {"fp32": 7e9}
    assert any("measured here" in note for note in after.notes)
    assert saved_machine({"XDG_CONFIG_HOME": str(tmp_path / "other")}) is None


def test_a_saved_file_that_cannot_be_read_says_how_to_make_it_anew(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    write_machine(saved_file(environment), "cards: 7\n")
    with pytest.raises(ConfigError, match=r"cannot use the saved .*not a list of cards"):
        saved_machine(environment)
