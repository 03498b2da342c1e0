"""``roundpipe doctor``: its words, its files and its exit codes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.cli import main
from roundpipe.cli.doctor import Wish, read_wish, run
from roundpipe.device.disk import DiskRates
from roundpipe.device.probe import Effort, Probe
from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.examine import Examination, Told
from roundpipe.finetune.forecast.examine_host import HostExamination
from roundpipe.finetune.forecast.examine_software import SoftwareExamination
from roundpipe.finetune.forecast.machines import load_machine, saved_file

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine

LITTLE = Effort(seconds=0.005, copy_bytes=2**20, matrix_size=256, product_seconds=1e-4)
HOST = HostExamination(effort=LITTLE, parameters=2**14)
QUICK = Examination(probe=lambda device, _: Probe(device, LITTLE), host=HOST)


class Free:
    """A reference model to which nothing makes a difference; it loads nothing."""

    name = "none"

    def __init__(self, measured: Machine) -> None:
        self.measured = measured

    def __call__(self, machine: Machine) -> float:
        return 1.0

    def largest(self, machine: Machine) -> str:
        return self.name


def doctor(*words: str, **more: Any) -> int:
    options = {"environment": {}, "how": QUICK, "told": Told(), "price": Free, **more}
    return run(["devices=cpu*2", *words], **options)


def test_the_words_of_the_command_line() -> None:
    assert read_wish([]) == Wish()
    wish = read_wish(["--json", "devices=cpu*2", "--output", "m.yaml", "--save"])
    assert (wish.devices, str(wish.output), wish.save, wish.as_json) == (
        "cpu*2",
        "m.yaml",
        True,
        True,
    )
    assert read_wish(["devices=[cpu, cpu]"]).devices == ["cpu", "cpu"]
    assert read_wish(["devices=null"]).devices == "auto"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jsn=true"], "unknown key: jsn\nhint: json"),
        (["m.yaml"], "doctor takes no file: m.yaml"),
        (["--json=7"], "neither true nor false: json=7"),
        (["--output"], "output names no file"),
    ],
)
def test_words_that_are_not_understood(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        read_wish(words)
    assert message in str(told.value)


def test_it_shows_what_it_found_and_the_machine_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 × cpu · ")
    assert "\nnothing is broken, missing or slow\nnote      there is no card" in shown
    assert " ns per parameter with 1 thread: " in shown
    assert "what is sent comes back intact" in shown
    assert "--output FILE writes it" in shown
    assert "\ncards:\n- name: cpu\n  count: 2\n" in shown


def test_the_file_it_writes_is_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert doctor("--output", str(file), "--save", environment=environment) == 0
    shown = capsys.readouterr().out
    assert f"machine file: {file}" in shown
    assert f"machine file: {saved_file(environment)}" in shown
    machine = load_machine(str(file))
    assert machine.text == "2 × cpu"
    here = load_machine(devices="cpu*2", environment=environment)
    assert here.cards[0].flops == machine.cards[0].flops


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_what_was_measured_is_told_where_its_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="cannot write the machine file: /dev/full"):
        doctor("--output", "/dev/full")
    assert "2 × cpu" in capsys.readouterr().out


def test_json_is_all_of_it_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == {"reference", "machine", "measured", "findings"}
    assert load_machine(values["machine"]).num_devices == 2
    assert values["measured"]["devices"][0]["is_intact"] is True
    assert {"level", "text", "price", "hint"} == set(values["findings"][0])


def test_disks_and_software_are_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    software = SoftwareExamination(
        {"WORLD_SIZE": "2"},
        folder=tmp_path,
        hub_cache=lambda: tmp_path,
        rates=lambda folder: DiskRates(1e9, 2e9),
    )
    assert doctor(how=replace(QUICK, software=software)) == 0
    shown = capsys.readouterr().out
    assert f"runs and the hub's cache: {tmp_path} · " in shown
    assert " free · written at 1 GB/s · read at 2 GB/s\n" in shown
    assert "missing   WORLD_SIZE=2 is set" in shown
    assert doctor("--json", how=replace(QUICK, software=software)) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["software"]["variables"] == {"WORLD_SIZE": "2"}
    assert measured["disks"][0]["write"] == 1e9


class Pretended:
    """A model twice as fast on any other machine than on that which was measured."""

    name = "8B, full"

    def __init__(self, measured: Machine) -> None:
        self.measured = measured

    def __call__(self, machine: Machine) -> float:
        return 1.0 if machine == self.measured else 2.0

    def largest(self, machine: Machine) -> str:
        return self.name


NO_COMPILER = replace(QUICK, host=replace(HOST, why_not_compiled=lambda: "no C++ compiler"))


def test_prices_are_asked_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(how=NO_COMPILER, price=Pretended) == 0
    shown = capsys.readouterr().out
    assert "slow      the optimizer is not compiled, " in shown
    assert "1 tokens/s now, 2 compiled; a step for all of an 8B model updates for " in shown
    assert "reference model: 8B, full" in shown
    assert doctor("--json", how=NO_COMPILER, price=Pretended) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == "8B, full"


def test_a_device_that_changes_bytes_is_bad_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "round_trip_is_intact", lambda self: False)
    assert doctor() == 2
    assert (
        "broken    cpu:0, cpu:1: what is copied there comes back changed" in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["doctor", "env"])
def test_the_command_has_two_names(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    # The package's attribute of this name is the command itself.
    module = sys.modules["roundpipe.cli.doctor"]
    monkeypatch.setattr(module, "run", lambda words, *, environment: seen.append(words) or 0)
    assert main([name, "devices=cpu", "--json"]) == 0
    assert seen == [["devices=cpu", "--json"]]


def test_an_error_of_the_command_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "devices=gpu"]) == 2
    assert capsys.readouterr().err.startswith("not a device: 'gpu'\n  hint: ")
