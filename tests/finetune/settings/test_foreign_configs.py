"""Whole configs as users of other trainers write them: what each key became, as golden text.

``UPDATE_GOLDEN=1 pytest …`` writes the texts anew, to be looked at before they are kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import reporters
from roundpipe.finetune.settings.account import account_lines
from roundpipe.finetune.settings.config import TrainConfig, dump_config, load_config, read_layers
from roundpipe.finetune.settings.parse import read_file

if TYPE_CHECKING:
    from roundpipe.finetune.settings.config import Reading

CONFIGS = Path(__file__).parent / "configs"
FILES = sorted(CONFIGS.glob("*/*.yaml"))
TWO_DEVICES = {"devices": "cpu*2"}


@pytest.fixture(autouse=True)
def _where_those_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS)  # dataset_dir: data
    monkeypatch.setattr(reporters, "installed_loggers", lambda: ["tensorboard"])


def read(file: Path) -> Reading:
    return read_layers(read_file(str(file)), {}, lambda devices: 2)


def account(file: Path) -> str:
    """What became of a config, as text."""
    try:
        reading = read(file)
    except ConfigError as refusal:
        return f"refused: {refusal}\n"
    lines = [*account_lines(reading.keys), "", *(f"· {note}" for note in reading.notes)]
    lines += ["", *_apart_from_defaults(reading.config)]
    return "\n".join(lines) + "\n"


def _apart_from_defaults(config: TrainConfig) -> list[str]:
    plain = TrainConfig(
        model_name_or_path="-", dataset="-", finetuning_type=config.finetuning_type,
        unfrozen_parameters=config.unfrozen_parameters,
    )  # fmt: skip
    usual = dump_config(plain).splitlines()
    return [line for line in dump_config(config).splitlines() if line not in usual]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_what_each_key_of_a_foreign_config_becomes(file: Path) -> None:
    golden = file.with_suffix(".txt")
    found = account(file)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_there_are_twenty_of_them_and_of_each_trainer_some_that_run() -> None:
    ran = [file for file in FILES if file.with_suffix(".txt").read_text()[:7] != "refused"]
    assert len(FILES) >= 20
    assert {file.parent.name for file in ran} == {"llamafactory", "axolotl", "unsloth", "trl"}
    assert len(ran) >= 14


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_config_that_was_translated_is_saved_and_loads_again(file: Path, tmp_path: Path) -> None:
    if account(file).startswith("refused: "):
        assert "\nhint: " in account(file)
        return
    config = read(file).config
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(config))
    again, notes = load_config([str(saved)])
    start = {"resume_from_checkpoint": "auto", "overwrite_output_dir": False}
    assert again == config.model_copy(update=start)
    assert notes == []
