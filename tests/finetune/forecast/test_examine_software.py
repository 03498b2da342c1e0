"""Libraries, variables and disks, of which most are invented."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.device.cards import Card
from roundpipe.device.disk import DiskRates
from roundpipe.finetune.forecast.examine_software import SoftwareExamination, requirements

if TYPE_CHECKING:
    from pathlib import Path

ASKED = [
    "torch>=2.11",
    "peft>=0.18",
    "bitsandbytes>=0.48",
    "gguf>=0.10; extra == 'gguf'",
    "sphinx>=8; extra == 'docs'",
    "not a requirement at all!",
]


def looking(**more: object) -> SoftwareExamination:
    versions = {"torch": "2.13.0+cpu", "peft": "0.9.0"}
    given = {
        "requirements": lambda: ASKED,
        "installed": versions.get,
        "has_token": lambda: True,
        "find_cards": lambda: [Card("NVIDIA", "/dev/nvidia0", has_driver=True)],
        "rates": lambda folder: DiskRates(1.23456e9, None),
        **more,
    }
    return SoftwareExamination(**given)


def test_libraries_are_compared_with_what_this_package_asks_for() -> None:
    found = {each.name: each for each in looking().software([]).packages}
    assert list(found) == ["torch", "peft", "bitsandbytes", "gguf"]  # nothing of the docs' extra
    assert found["torch"].is_enough
    assert (found["peft"].version, found["peft"].needs, found["peft"].is_enough) == (
        "0.9.0",
        "0.18",
        False,
    )
    assert found["bitsandbytes"].version is None
    assert [each.is_optional for each in found.values()] == [False, False, False, True]


def test_our_own_requirements_name_the_libraries_that_trainings_need() -> None:
    names = " ".join(requirements())
    for name in ("torch", "transformers", "peft", "bitsandbytes", "gguf"):
        assert name in names


def test_of_the_shell_only_what_matters_is_kept() -> None:
    environment = {"WORLD_SIZE": "8", "HF_TOKEN": "hf_secret", "PATH": "/bin"}
    software = looking(environment=environment).software([])
    assert software.variables == {"WORLD_SIZE": "8"}
    assert "hf_secret" not in repr(software)


def test_a_card_that_was_not_asked_for_is_named() -> None:
    assert looking().software([]).unused_cards == "NVIDIA (/dev/nvidia0)"


def test_one_disk_for_both_uses_is_measured_once(tmp_path: Path) -> None:
    seen: list[Path] = []

    def rates(folder: Path) -> DiskRates:
        seen.append(folder)
        return DiskRates(1.23456e9, None)

    how = looking(folder=tmp_path, hub_cache=lambda: tmp_path / "not" / "yet", rates=rates)
    [disk] = how.disks()
    assert seen == [tmp_path]
    assert (disk.used_for, disk.folder) == ("runs and the hub's cache", str(tmp_path))
    assert (disk.write, disk.read) == (1.23e9, None)
    assert disk.free_bytes is not None
