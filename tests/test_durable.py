"""Files and folders that are whole or absent."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest

from roundpipe import durable
from roundpipe.durable import (
    Fingerprint,
    HashedFile,
    clear_leftovers,
    fingerprint,
    remove_folder,
    whole_folder,
    write_new,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("order", [(0, 3, 6), (6, 0, 3), (3, 6, 0), (0, 6, 3)])
def test_a_file_knows_what_it_is_in_whatever_order_it_was_written(order, tmp_path):
    with HashedFile(tmp_path / "file") as file:
        for place in order:
            file.write_at(place, b"abcdefghi"[place : place + 3])
        written = file.finish()
    assert written == Fingerprint(9, hashlib.sha256(b"abcdefghi").hexdigest())
    assert fingerprint(tmp_path / "file") == written


def test_large_pieces_are_written_whole(tmp_path):
    data = bytes(range(256)) * (3 << 15)
    with HashedFile(tmp_path / "file") as file:
        file.write_at(0, memoryview(data))
        assert file.finish() == Fingerprint(len(data), hashlib.sha256(data).hexdigest())
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "before"
    write_text(tmp_path / "file", "after")
    assert names(tmp_path) == ["file"]


def test_files_have_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    write_new(tmp_path / "new", "")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_link_and_a_pipe_are_written_to_and_not_replaced(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "file").touch()
    link.symlink_to("file")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        durable.write_text(link, "one")
        durable.write_text(pipe, "two")
        assert os.read(reader, 9) == b"two"
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "one"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "deep" / "folder"
    with whole_folder(folder) as place:
        write_new(place / "file", "one")
        assert not folder.exists()
    assert names(folder) == ["file"]
    with whole_folder(folder) as place:
        write_new(place / "other", "two")
        assert names(folder) == ["file"]
    assert names(folder) == ["other"]
    assert names(folder.parent) == ["folder"]


def test_nothing_is_left_of_a_folder_that_fails(tmp_path):
    def fails(error):
        with whole_folder(tmp_path / "folder") as place:
            write_new(place / "file", "one")
            raise error

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            fails(error)
        assert names(tmp_path) == []


def test_what_had_the_name_stays_where_the_new_one_cannot_come(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    rename = os.rename

    def refuses(source, target):
        if ".saving-" in str(source):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuses)
    with pytest.raises(OSError, match="no"), whole_folder(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["old"]


def test_folders_are_removed_at_once(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    seen = []
    monkeypatch.setattr(durable.shutil, "rmtree", lambda path, **_: seen.append(path.name))
    remove_folder(tmp_path / "folder")
    assert names(tmp_path) == seen  # under a name that nobody takes for a checkpoint's
    assert seen[0].startswith(".removed-folder-")
    monkeypatch.undo()
    clear_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_leftovers_are_told_from_files_of_others(tmp_path):
    for name in (".saving-a-0123abcd", ".saving-", ".saved-x-0123abcd", "saving-x-0123abcd"):
        (tmp_path / name).mkdir()
    (tmp_path / ".saving-file-0123abcd").touch()
    os.symlink(tmp_path / "saving-x-0123abcd", tmp_path / ".removed-link-0123abcd")
    clear_leftovers(tmp_path)
    kept = [".removed-link-0123abcd", ".saved-x-0123abcd", ".saving-", ".saving-file-0123abcd"]
    assert names(tmp_path) == [*kept, "saving-x-0123abcd"]
