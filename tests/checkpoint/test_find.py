"""Checkpoints are found whole or not used: every file, every byte, every name."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from roundpipe.checkpoint.find import (
    check,
    checkpoints_in,
    drop_old,
    manifest_of,
    name_of,
    newest_whole,
)
from roundpipe.checkpoint.load import open_checkpoint
from roundpipe.checkpoint.manifest import MANIFEST, Manifest, files_in
from roundpipe.durable import fingerprint
from roundpipe.errors import ConfigError


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two checkpoints of a real training."""
    import contextlib

    from roundpipe import RoundPipe
    from roundpipe.optim import AdamW

    parent = tmp_path_factory.mktemp("runs")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with contextlib.closing(RoundPipe(model, devices=1)) as pipe:
        optimizer = AdamW(pipe.optim_parameters())
        for step in (1, 2):
            x = torch.ones(8, 4)
            pipe.forward_backward((x,), label=x, loss_fn=lambda o, y: (o - y).square().mean())
            pipe.step(optimizer)
            pipe.save_checkpoint(parent / name_of(step), optimizer, about={"step": step}, step=step)
    return parent


@pytest.fixture
def runs(real, tmp_path):
    return shutil.copytree(real, tmp_path / "runs")


def resigned(folder, change):
    """A manifest that somebody made who knows how, with names and numbers of their own."""
    content = json.loads((folder / MANIFEST).read_text())
    said = manifest_of(folder)
    (folder / MANIFEST).unlink()
    files = dict(said.files)
    change(files)
    Manifest(content["step"], said.about, files).write(folder)


def test_they_are_listed_in_order_of_steps(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-0", "checkpoint-x", "checkpoint-01"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    os.symlink(tmp_path / "checkpoint-9", tmp_path / "checkpoint-8")
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names == ["checkpoint-0", "checkpoint-9", "checkpoint-10"]
    assert checkpoints_in(tmp_path / "none") == []
    assert newest_whole(tmp_path / "none") == (None, [])


def test_a_whole_one_says_what_it_is(runs):
    manifest = check(runs / "checkpoint-2")
    assert manifest.step == 2
    assert manifest.about == {"step": 2}
    assert newest_whole(runs) == (runs / "checkpoint-2", [])


def test_what_was_found_whole_is_read_again_only_where_somebody_has_touched_it(runs, monkeypatch):
    folder = runs / "checkpoint-2"
    read, done = [], []

    def counting(path, tell):
        read.append(path.name)
        return fingerprint(path, tell)

    monkeypatch.setattr("roundpipe.checkpoint.manifest.fingerprint", counting)
    known = check(folder, tell=done.append)
    assert sorted(read) == sorted(known.files)
    assert done[-1] == known.num_bytes
    assert not check(folder, by_size=True).stamps
    read.clear()
    assert check(folder, known=check(folder, known=known)) == known
    assert open_checkpoint(folder, known).manifest == known
    assert not read
    path = folder / "state.json"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it were the old one
    with pytest.raises(ConfigError, match=r"state\.json is not what was written"):
        check(folder, known=known)
    assert read == ["state.json"]


def test_every_file_that_is_cut_flipped_or_missing_is_named(runs):
    folder = runs / "checkpoint-2"
    for name in list(files_in(folder)):
        path = folder / name
        data = path.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        for broken in (data[:-2], b"", data + b"\0", flipped, None):
            path.unlink()
            if broken is not None:
                path.write_bytes(broken)
            found, reasons = newest_whole(runs)
            assert found == runs / "checkpoint-1", (name, broken)
            assert name in reasons[0]
            with pytest.raises(ConfigError, match=name):
                check(folder)
        path.write_bytes(data)
    assert newest_whole(runs) == (folder, [])


def test_no_bit_of_a_manifest_can_be_flipped(runs):
    path = runs / "checkpoint-2" / MANIFEST
    data = path.read_bytes()
    was = manifest_of(path.parent)
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            found = manifest_of(path.parent)
        except ConfigError:
            continue
        assert found == was  # white space


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/passwd", "a/../../b", "a\\b", "", "a//b", "b/c/d/e/f", MANIFEST]
)
def test_names_that_lead_out_of_it_are_refused(name, runs):
    folder = runs / "checkpoint-2"
    resigned(folder, lambda files: files.update({name: next(iter(files.values()))}))
    with pytest.raises(ConfigError, match="names a file outside of it"):
        check(folder)


def test_what_somebody_else_has_put_there_is_not_looked_at(runs):
    folder = runs / "checkpoint-2"
    for name in (".hidden", "notes.txt", "optimizer-00009.safetensors"):
        (folder / name).write_bytes(b"")
    os.symlink(folder / "nowhere", folder / "a link")
    (folder / "a folder").mkdir()
    check(folder)
    assert open_checkpoint(folder).state == {"step": 2}


def test_links_in_place_of_its_files_are_refused(runs):
    folder = runs / "checkpoint-2"
    (folder / "state.json").rename(runs / "elsewhere")
    os.symlink(runs / "elsewhere", folder / "state.json")
    with pytest.raises(ConfigError, match=r"state\.json is no regular file"):
        check(folder)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        check(runs / "checkpoint-3")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"format": "roundpipe checkpoint 2"},
        {"format": "roundpipe checkpoint 1", "step": None, "about": {}, "files": {}},
    ],
)
def test_a_manifest_of_another_form_is_refused(content, runs):
    path = runs / "checkpoint-2" / MANIFEST
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"not a whole checkpoint.*manifest\.json"):
        check(path.parent)


@pytest.mark.parametrize("size", [-1, 1.5, "9", 1 << 70, None, True])
def test_sizes_that_make_no_sense_are_refused(size, runs):
    folder = runs / "checkpoint-2"
    content = json.loads((folder / MANIFEST).read_text())
    first = next(iter(content["files"]))
    content["files"][first]["num_bytes"] = size
    content.pop("sha256")
    from roundpipe.checkpoint import manifest as module

    content["sha256"] = module._digest(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="says nothing that makes sense"):
        check(folder)


def test_safetensors_that_lie_about_themselves_are_refused_before_anything_is_read(runs):
    folder = runs / "checkpoint-2"
    path = folder / "optimizer-00000.safetensors"
    header = json.dumps({"master/0.weight": {
        "dtype": "F32", "shape": [1 << 40, 1 << 15], "data_offsets": [0, 1 << 57]}})  # fmt: skip
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    resigned(folder, lambda files: files.update({path.name: fingerprint(path)}))
    check(folder)  # it is what its manifest says
    with pytest.raises(ConfigError, match=r"not a sound safetensors file.*optimizer-00000"):
        open_checkpoint(folder)


def test_a_state_that_makes_no_sense_is_refused(runs):
    folder = runs / "checkpoint-2"
    path = folder / "state.json"
    whole = json.loads(path.read_text())
    for key, value in (
        ("format", 2),
        ("layer files", ["../x"]),
        ("progress", {"seed": 1}),
        ("random", 3),
        ("state", [1]),
        ("optimizer", {"groups": [{"options": {}}]}),
        ("state", {"$code": "import os"}),
    ):
        path.write_text(json.dumps({**whole, key: value}))
        resigned(folder, lambda files: files.update({path.name: fingerprint(path)}))
        with pytest.raises(ConfigError, match=r"not a state that can be gone on from"):
            open_checkpoint(folder)


def test_the_oldest_go_and_the_last_good_one_never(runs):
    shutil.copytree(runs / "checkpoint-1", runs / "checkpoint-0")
    assert drop_old(runs, 3) == []
    assert drop_old(runs, 1, never=[runs / "checkpoint-0"]) == [runs / "checkpoint-1"]
    (runs / "checkpoint-2" / MANIFEST).unlink()
    (runs / "checkpoint-3").mkdir()
    assert drop_old(runs, 2) == []  # both kept ones are broken
    assert newest_whole(runs)[0] == runs / "checkpoint-0"


def test_a_newer_one_that_was_left_out_does_not_drive_out_what_is_made_after_it(runs):
    """It has the right sizes and a wrong byte: only who reads all of it sees that."""
    path = shutil.copytree(runs / "checkpoint-2", runs / "checkpoint-4") / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert newest_whole(runs)[0] == runs / "checkpoint-2"
    assert drop_old(runs, 1, up_to=2) == [runs / "checkpoint-1"]
    assert [path.name for path in checkpoints_in(runs)] == ["checkpoint-2", "checkpoint-4"]


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(runs):
    from roundpipe import durable

    (runs / ".saving-checkpoint-9-0123abcd").mkdir()
    (runs / ".removed-checkpoint-8-0123abcd").mkdir()
    (runs / "checkpoint-2").rename(runs / ".replaced-checkpoint-2-0123abcd")
    (runs / ".git").mkdir()
    with durable.whole_folder(runs / "checkpoint-5") as live:
        assert newest_whole(runs)[0].name == "checkpoint-2"
        left = sorted(path.name for path in runs.iterdir())
        assert left == sorted([".git", live.name, "checkpoint-1", "checkpoint-2"])
    assert (runs / "checkpoint-5").is_dir()
