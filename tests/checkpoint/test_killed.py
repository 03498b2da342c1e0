"""A process that dies, or a disk that is full, at any operation of a save: what was there stays."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from torch import nn

import roundpipe
from roundpipe.checkpoint.find import check, checkpoints_in, drop_old, manifest_of, newest_whole
from roundpipe.checkpoint.load import open_checkpoint
from roundpipe.errors import ConfigError

_SPEC = importlib.util.spec_from_file_location(
    "failing_disk", Path(__file__).with_name("failing_disk.py")
)
failing_disk = importlib.util.module_from_spec(_SPEC)
sys.modules["failing_disk"] = failing_disk
_SPEC.loader.exec_module(failing_disk)


@pytest.fixture
def tiny(training):
    """A training of one layer, so that a save has few operations."""
    plan = roundpipe.ModelExecutePlan()
    plan.bwd_plan = [range(1)]
    made = training(model=nn.Sequential(nn.Linear(12, 12, bias=False)), devices=1)
    made.pipe._config = roundpipe.RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
    return made


@pytest.fixture
def disk(monkeypatch, tmp_path):
    return failing_disk.Disk(monkeypatch, tmp_path)


def beside(folder):
    (folder / "tokenizer.json").write_text("{}")


def save(made, parent):
    """What a run does: a new checkpoint, then the oldest goes."""
    made.save(
        parent / f"checkpoint-{made.num_steps}", beside=beside, about={"step": made.num_steps}
    )
    drop_old(parent, 2)


def test_at_whatever_operation_it_is_killed_the_newest_whole_one_loads(tiny, disk, tmp_path):
    known, parent = tmp_path / "known", tmp_path / "runs"
    for _ in range(3):
        tiny.step()
        tiny.save(known / f"checkpoint-{tiny.num_steps}", beside=beside)
    good = {path.name: manifest_of(path).files for path in checkpoints_in(known)}
    shutil.rmtree(known / "checkpoint-3")
    found = []
    while True:
        shutil.rmtree(parent, ignore_errors=True)
        shutil.copytree(known, parent)
        disk.restart(killed_at=len(found))
        try:
            save(tiny, parent)
        except failing_disk.Killed:
            is_over = False
        else:
            is_over = True
        disk.restart()
        newest, reasons = newest_whole(parent)
        assert not reasons
        assert manifest_of(newest).files == good[newest.name]
        found.append(newest.name)
        shown = [path.name for path in parent.iterdir()]
        assert all(name.startswith("checkpoint-") for name in shown), shown
        if is_over:
            break
    assert shown in (["checkpoint-2", "checkpoint-3"], ["checkpoint-3", "checkpoint-2"])
    assert found == sorted(found)  # once it is there it stays
    assert 25 < found.count("checkpoint-2") < 60
    assert found.count("checkpoint-3") > 5  # of the deletion behind it


def test_a_folder_that_is_replaced_is_the_old_one_or_the_new_one(tiny, disk, tmp_path):
    last, known = tmp_path / "last", []
    for _ in range(2):
        tiny.step()
        tiny.save(last)
        known.append(manifest_of(last).files)
        shutil.copytree(last, tmp_path / f"known-{len(known)}")
    number, found = 0, set()
    while True:
        shutil.rmtree(last)
        shutil.copytree(tmp_path / "known-1", last)
        disk.restart(killed_at=number)
        try:
            tiny.save(last)
        except failing_disk.Killed:
            number += 1
        else:
            break
        disk.restart()
        found.add(known.index(open_checkpoint(last).manifest.files))
    assert found == {0, 1}
    assert 30 < number < 80


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tiny, disk, tmp_path):
    tiny.step()
    tiny.save(tmp_path / "checkpoint-1", beside=beside)
    before = manifest_of(tmp_path / "checkpoint-1").files
    tiny.step()
    disk.restart(full_from=0)
    number = 0
    while True:
        disk.restart(full_from=number)
        try:
            saved = tiny.save(tmp_path / "checkpoint-2", is_async=number % 3 == 0)
            saved.wait()
        except ConfigError as error:
            told = str(error)
        else:
            break
        number += 1
        assert "could not be written" in told
        assert "MiB free" in told
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert number > 8
    assert check(tmp_path / "checkpoint-1").files == before
    assert newest_whole(tmp_path)[0].name == "checkpoint-2"


def test_training_goes_on_untouched_after_a_save_that_failed(
    training, disk, tmp_path, never_stopped, same_bits
):
    expected, _ = never_stopped()
    made = training().step(2)
    disk.restart(full_from=3)
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    made.step(2)
    with pytest.raises(ConfigError, match="could not be written"):
        saved.wait()
    assert saved.is_done
    same_bits(made.outcome(), expected)


def test_the_next_save_tells_of_the_one_that_failed(tiny, disk, tmp_path):
    tiny.step()
    disk.restart(full_from=0)
    tiny.save(tmp_path / "checkpoint-1", is_async=True)
    with pytest.raises(ConfigError, match="could not be written"):
        tiny.save(tmp_path / "checkpoint-1")
    disk.restart()
    tiny.save(tmp_path / "checkpoint-1")
    assert check(tmp_path / "checkpoint-1").step is None
