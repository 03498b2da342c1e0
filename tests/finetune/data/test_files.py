from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data.files import Split, find_files, is_hub_id, split_of
from roundpipe.finetune.data.rows import read_rows
from roundpipe.finetune.settings.entry import DatasetEntry

if TYPE_CHECKING:
    from pathlib import Path


def entry(path: Any, **more: Any) -> DatasetEntry:
    return DatasetEntry.model_validate({"path": str(path), **more})


def make(folder: Path, *names: str) -> Path:
    """Each file holds its own name as text."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{{"text": "{name}"}}\n')
    return folder


def found(path: Any, **more: Any) -> list[str]:
    return [row.values["text"] for row in read_rows(entry(path, **more))]


def test_kinds_are_told_by_the_name_below_what_it_is_packed_with(tmp_path: Path) -> None:
    names = ("a.jsonl", "b.JSON.gz", "c.csv.bz2", "d.tsv", "e.parquet", "f.feather", "g.txt.zst")
    make(tmp_path, *names)
    files = [find_files(entry(tmp_path / name))[0] for name in names]
    assert [(file.kind, file.packed) for file in files] == [
        ("lines", ""),
        ("json", ".gz"),
        ("csv", ".bz2"),
        ("csv", ""),
        ("parquet", ""),
        ("arrow", ""),
        ("text", ".zst"),
    ]


@pytest.mark.parametrize(
    ("path", "is_hub"),
    [
        ("openai/gsm8k", True),
        ("squad", True),
        ("some-body/data.v2", True),
        ("data.jsonl", False),
        ("data.csv.gz", False),
        ("a/b/c", False),
        ("./gsm8k", False),
        ("/data/gsm8k", False),
        ("~/gsm8k", False),
        ("data/*.jsonl", False),
        ("a/b.xlsx", False),
    ],
)
def test_a_name_that_no_file_could_have_is_one_of_the_hub(path: str, is_hub: bool) -> None:
    assert is_hub_id(entry(path)) is is_hub


def test_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, "openai/gsm8k/a.jsonl"))
    assert not is_hub_id(entry("openai/gsm8k"))
    assert found("openai/gsm8k") == ["openai/gsm8k/a.jsonl"]


# folders and their splits


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.jsonl", "in/c.jsonl", ".hidden.jsonl", ".git/d.jsonl")
    make(tmp_path, "README.md", "notes.txt", "dataset_infos.json")
    assert found(tmp_path) == ["a.jsonl", "b.jsonl", "in/c.jsonl"]


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (("train.jsonl", "test.jsonl"), None, ["train.jsonl"]),
        (("train.jsonl", "test.jsonl"), "test", ["test.jsonl"]),
        (("my_train_1.jsonl", "my_dev_1.jsonl"), "validation", ["my_dev_1.jsonl"]),
        (("train/a.jsonl", "valid/a.jsonl"), None, ["train/a.jsonl"]),
        (
            ("data/train-00000-of-00001.jsonl", "data/x.jsonl"),
            None,
            ["data/train-00000-of-00001.j"],
        ),
        (("gold-00000-of-00001.jsonl", "train.jsonl"), "gold", ["gold-00000-of-00001.jsonl"]),
        (("training/test.jsonl",), "test", ["training/test.jsonl"]),
        (("train.jsonl", "eval.jsonl"), "train+test", ["train.jsonl", "eval.jsonl"]),
        (("constrained.jsonl", "attest.jsonl"), None, ["attest.jsonl", "constrained.jsonl"]),
    ],
)
def test_splits_are_told_by_words_in_the_names(
    names: tuple[str, ...], split: str | None, chosen: list[str], tmp_path: Path
) -> None:
    make(tmp_path, *names)
    read = found(tmp_path, split=split)
    assert len(read) == len(chosen)
    assert all(name.startswith(start) for name, start in zip(read, chosen, strict=True))


def test_a_split_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    make(tmp_path, "train.jsonl", "dev.jsonl")
    with pytest.raises(
        DataError, match=r"no split test in the folder: .*; there are: train, validation\nhint: "
    ):
        find_files(entry(tmp_path, split="test"))
    make(tmp_path / "plain", "a.jsonl")
    with pytest.raises(DataError, match=r"no split test .*; there are: train\n"):
        find_files(entry(tmp_path / "plain", split="test"))


def test_a_split_may_name_several_and_some_rows_of_them(tmp_path: Path) -> None:
    assert split_of(entry("a")) == Split()
    assert split_of(entry("a", split="train + test")) == Split(("train", "test"))
    assert split_of(entry("a", split="train[10:20]")) == Split(("train",), 10, 20)
    for wrong in ("train[10%:]", "train[", "a b+", "train[-5:]"):
        with pytest.raises(DataError, match="not a split of files"):
            split_of(entry("a", split=wrong))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10)))
    assert found(path, split="train[2:5]") == ["2", "3", "4"]
    assert found(path, split="train[7:]") == ["7", "8", "9"]
    assert found(path, split="train[:5]", max_samples=2) == ["0", "1"]


def test_data_files_choose_in_a_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl", "test/c.jsonl")
    assert found(tmp_path, data_files="*/c.jsonl") == ["test/c.jsonl"]
    assert found(tmp_path, data_files=["b.jsonl", "?.jsonl"]) == ["b.jsonl", "a.jsonl"]
    with pytest.raises(DataError, match=r"no file matches: .*d\.jsonl\nhint: "):
        found(tmp_path, data_files="d.jsonl")
    with pytest.raises(DataError, match="outside of the folder"):
        found(tmp_path / "test", data_files="../a.jsonl")


def test_a_path_may_be_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "d/a.jsonl", "d/b.jsonl")
    assert found(tmp_path / "d" / "*.jsonl") == ["d/a.jsonl", "d/b.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert found("d/[b]*.jsonl") == ["d/b.jsonl"]
    with pytest.raises(DataError, match=r"no file matches: d/c\*\.jsonl"):
        found("d/c*.jsonl")


def test_a_folder_of_two_kinds_asks_which(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "a.csv")
    with pytest.raises(DataError, match=r"files of several kinds .* has \.csv, \.jsonl\nhint: .*"):
        find_files(entry(tmp_path))
    assert found(tmp_path, data_files="*.jsonl") == ["a.jsonl"]


def test_a_folder_without_data_says_what_would_be(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors", "README.md")
    with pytest.raises(DataError, match=r"no data files in the folder: .*\nhint: one of \.jsonl"):
        find_files(entry(tmp_path))


# copies of datasets of the hub


LISTS = """---
license: mit
configs:
- config_name: main
  data_files: [{split: train, path: main/tr*}, {split: test, path: [main/te*]}]
- config_name: other
  data_files: {train: other/a.jsonl}
- config_name: plain
  data_dir: plain
---
# A dataset
"""


def test_configurations_of_a_folder_are_not_read_as_one(tmp_path: Path) -> None:
    make(tmp_path, "main/train.jsonl", "main/test.jsonl", "other/a.jsonl", "plain/b.jsonl")
    (tmp_path / "README.md").write_text(LISTS)
    with pytest.raises(
        DataError, match=r"several configurations .*; there are: main, other, plain\nhint: .*main"
    ):
        find_files(entry(tmp_path))
    assert found(tmp_path, name="main") == ["main/train.jsonl"]
    assert found(tmp_path, name="main", split="test") == ["main/test.jsonl"]
    assert found(tmp_path, name="other") == ["other/a.jsonl"]
    assert found(tmp_path, name="plain") == ["plain/b.jsonl"]
    with pytest.raises(DataError, match=r"no configuration x .*; there are: main, other, plain"):
        find_files(entry(tmp_path, name="x"))
    with pytest.raises(DataError, match=r"no split dev .*; there are: train, test"):
        find_files(entry(tmp_path, name="main", split="dev"))


@pytest.mark.parametrize("files", ["a.jsonl", "[a.jsonl]", "[{split: train, path: a.jsonl}]"])
def test_one_configuration_or_a_default_needs_no_name(files: str, tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    one = f"- config_name: main\n  data_files: {files}\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{one}---\n")
    assert found(tmp_path) == ["a.jsonl"]
    two = one + "- config_name: default\n  data_files: b.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{two}---\n")
    assert found(tmp_path) == ["b.jsonl"]


@pytest.mark.parametrize("head", ["", "# hi", "---\n: [\n---", "---\n- a\n---", "---\nconfigs: 3"])
def test_a_readme_that_lists_nothing_does_no_harm(head: str, tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "in/b.jsonl")
    (tmp_path / "README.md").write_text(head)
    assert found(tmp_path) == ["a.jsonl", "in/b.jsonl"]
    assert found(tmp_path, name="in") == ["in/b.jsonl"]
    with pytest.raises(DataError, match="no configuration x in the folder"):
        find_files(entry(tmp_path, name="x"))


def test_an_address_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a file of this machine: https://x\.org/a\.jsonl"):
        find_files(entry("https://x.org/a.jsonl"))


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    path = make(tmp_path, "a.jsonl") / "a.jsonl"
    files = find_files(entry(path))
    path.unlink()
    from roundpipe.finetune.data.rows import FileRows

    with pytest.raises(DataError, match=r"cannot read: .*: no such file"):
        list(FileRows(files, Split()).rows(lambda *_: None, lambda read: None))


def test_a_readme_leads_to_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.jsonl").write_text('{"text": "x"}\n')
    inside = tmp_path / "data"
    inside.mkdir()
    head = "configs:\n- config_name: default\n  data_dir: {}\n  data_files: {}\n"
    for folder, files, message in (
        ("../out", "'*'", "data_dir outside of the folder"),
        (str(tmp_path / "out"), "'*'", "data_dir outside of the folder"),
        ("", "../out/*", "data_files outside of the folder"),
        ("", "[{split: train, path: [1, null]}]", "no file matches"),
    ):
        (inside / "README.md").write_text(f"---\n{head.format(folder or '.', files)}---\n")
        with pytest.raises(DataError, match=message):
            find_files(entry(inside))


def test_one_file_has_no_splits_but_what_its_name_says(tmp_path: Path) -> None:
    make(tmp_path, "rows.jsonl", "my-test.jsonl")
    assert found(tmp_path / "rows.jsonl", split="train[:1]") == ["rows.jsonl"]
    assert found(tmp_path / "my-test.jsonl", split="test") == ["my-test.jsonl"]
    with pytest.raises(DataError, match=r"one file has no splits: .*rows.jsonl, split: test"):
        found(tmp_path / "rows.jsonl", split="test")
    with pytest.raises(DataError, match=r"no rows: .* has none in split train\[5:\]"):
        found(tmp_path / "rows.jsonl", split="train[5:]")
