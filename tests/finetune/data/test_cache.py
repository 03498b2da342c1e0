from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from roundpipe.finetune.data import cache as caching
from roundpipe.finetune.data.cache import TokenCache, default_folder
from roundpipe.finetune.data.samples import Sample, Samples
from roundpipe.store.folder_lock import lock_folder

SAMPLES = [Sample([1, 2, 3], [-100, 2, 3]), Sample([4, 5], [-100, 5])]


def make(cache: TokenCache, key: str, samples: list[Sample] = SAMPLES) -> None:
    with cache.making(key) as making:
        making.writer.add(samples, range(len(samples)))
        making.account = {"rows": len(samples)}


def test_an_entry_is_found_with_its_samples_and_account(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "deep" / "tokens")
    assert cache.find("k") is None
    make(cache, "k")
    found = TokenCache(cache.folder).find("k")
    assert found is not None
    assert list(Samples([found.part])) == SAMPLES
    assert found.account == {"rows": 2}
    assert [path.name for path in cache.folder.iterdir()] == ["k"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError])
def test_a_making_that_ends_early_leaves_nothing(
    problem: type[BaseException], tmp_path: Path
) -> None:
    def fail() -> None:
        with TokenCache(tmp_path).making("k") as making:
            making.writer.add(SAMPLES, range(len(SAMPLES)))
            raise problem

    with pytest.raises(problem):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["input_ids.bin", "labels.bin", "starts.bin", "num_trained.bin"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "longer"])
def test_a_damaged_entry_is_taken_away(name: str, damage: str, tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    make(cache, "k")
    file = tmp_path / "k" / name
    content = file.read_bytes()
    changed = {
        "cut": content[:-4],
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "longer": content + b"\0\0\0\0",
    }
    if damage == "gone":
        file.unlink()
    else:
        times = file.stat()
        file.write_bytes(changed[damage])
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.find("k") is None
    assert not (tmp_path / "k").exists()
    make(cache, "k")
    assert cache.find("k") is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "files": {}}'])
def test_an_entry_without_its_list_of_files_is_taken_away(text: str, tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    make(cache, "k")
    (tmp_path / "k" / "about.json").write_text(text)
    assert cache.find("k") is None


def test_a_large_entry_is_read_through_only_if_its_files_were_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(tmp_path)
    make(cache, "k")
    monkeypatch.setattr(caching, "_ALWAYS_CHECKED", 0)
    read: list[str] = []
    plain = caching._digest

    def digest(path: Path, *show: Any) -> str:
        read.append(path.name)
        return plain(path, *show)

    monkeypatch.setattr(caching, "_digest", digest)
    assert cache.find("k") is not None
    assert read == []
    times = (tmp_path / "k" / "starts.bin").stat()
    make(cache, "shorter")
    (tmp_path / "shorter" / "starts.bin").write_bytes(b"\0" * 8)
    about = tmp_path / "shorter" / "about.json"
    known = json.loads(about.read_text())
    known["files"]["starts.bin"]["mtime_ns"] = times.st_mtime_ns
    about.write_text(json.dumps(known))
    os.utime(tmp_path / "shorter" / "starts.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    assert cache.find("shorter") is None
    os.utime(tmp_path / "k" / "labels.bin", (1, 1))
    assert cache.find("k") is not None
    assert read == ["labels.bin"]
    (tmp_path / "k" / "labels.bin").write_bytes(b"\1" * 20)
    assert cache.find("k") is None


def test_two_that_make_the_same_do_not_meet(tmp_path: Path) -> None:
    first, second = TokenCache(tmp_path), TokenCache(tmp_path)
    with first.making("k") as one, second.making("k") as other:
        one.writer.add(SAMPLES, range(len(SAMPLES)))
        other.writer.add(SAMPLES, range(len(SAMPLES)))
    found = first.find("k")
    assert found is not None
    assert list(Samples([found.part])) == SAMPLES
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_what_a_killed_process_left_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    old = time.time() - 3600
    for name in (".making-dead", ".making-live", ".making-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.bin").write_bytes(b"x")
        if name != ".making-new":
            os.utime(tmp_path / name / "labels.bin", (old, old))
    with lock_folder(tmp_path / ".making-live", key="k"):
        for path in (tmp_path / ".making-live" / ".lock", *tmp_path.glob(".making-[dl]*")):
            os.utime(path, (old, old))
        TokenCache(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {".making-live", ".making-new"}


# digests of files


def test_the_digest_of_a_file_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(tmp_path / "cache")
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    os.utime(file, (1000, 1000))
    seen: list[int] = []
    first = cache.digest_of_file(file, seen.append)
    assert seen == [3]
    assert cache.digest_of_file(file, seen.append) == first
    assert seen == [3]
    file.write_text("two")
    os.utime(file, (2000, 2000))
    second = cache.digest_of_file(file, seen.append)
    assert second != first
    (cache.folder / "digests" / next((cache.folder / "digests").iterdir()).name).write_text("{")
    assert cache.digest_of_file(file, seen.append) == second


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "cache")
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    cache.digest_of_file(file, lambda read: None)
    assert not (cache.folder / "digests").exists()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/roundpipe/tokens"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/roundpipe/tokens"),
        ({"HOME": "/h", "HF_HOME": "/f"}, "/f/roundpipe/tokens"),
        ({"HOME": "/h", "XDG_CACHE_HOME": ""}, "/h/.cache/roundpipe/tokens"),
        ({}, None),
    ],
)
def test_where_tokens_are_kept_is_said_by_the_environment(
    environment: dict[str, str], folder: str | None
) -> None:
    assert default_folder(environment) == (folder and Path(folder))


def test_the_list_of_files_is_one_that_people_can_read(tmp_path: Path) -> None:
    make(TokenCache(tmp_path), "k")
    about = json.loads((tmp_path / "k" / "about.json").read_text())
    assert about["account"] == {"rows": 2}
    assert about["files"]["input_ids.bin"]["bytes"] == 20
