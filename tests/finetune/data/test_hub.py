"""What the hub's library raises, put into words. It is not asked itself: that takes seconds."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data import hub
from roundpipe.finetune.data.rows import open_rows, read_rows
from roundpipe.finetune.settings.entry import DatasetEntry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pa = pytest.importorskip("pyarrow")


def entry(**more: Any) -> DatasetEntry:
    return DatasetEntry.model_validate({"path": "owner/name", **more})


class Loaded:
    """As much of a loaded dataset as is used."""

    def __init__(self, rows: list[Any], file: Path) -> None:
        self.table = pa.Table.from_pylist(rows)
        self.cache_files = [{"filename": str(file)}]
        self.split = "train"
        self.info = SimpleNamespace(config_name="main")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def with_format(self, kind: str) -> Loaded:
        assert kind == "arrow"
        return self

    def iter(self, *, batch_size: int) -> Iterator[Any]:
        for start in range(0, len(self), batch_size):
            yield self.table.slice(start, batch_size)


class Library:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def load_dataset(self, *given: Any, **more: Any) -> Any:
        self.asked.append((given, more))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(answer: Any) -> Library:
        made = Library(answer)
        monkeypatch.setattr(hub.importlib, "import_module", lambda name: made)
        return made

    return install


def test_rows_of_the_hub_are_those_of_the_library(tmp_path: Path, library: Any) -> None:
    file = tmp_path / "a.arrow"
    file.write_bytes(b"x" * 1000)
    rows = [{"question": str(i), "answer": None if i else "a"} for i in range(600)]
    made = library(Loaded(rows, file))
    asked = entry(name="main", split="test[:10%]", data_files="*.parquet", revision="v1")
    source = open_rows(asked)
    seen: list[int] = []
    found = list(read_rows(asked, source=source, show=seen.append))
    assert [row.values for row in found] == rows
    assert str(found[3].place) == "owner/name, row 4"
    assert (source.count(), source.num_bytes, source.paths) == (600, 1000, [file])
    assert seen[-1] == 1000
    given, more = made.asked[0]
    assert given == ("owner/name", "main")
    assert more == {"split": "test[:10%]", "data_files": ["*.parquet"], "revision": "v1"}
    open_rows(entry())
    assert made.asked[1][1] == {"split": "train", "data_files": None, "revision": None}


def named(name: str, *bases: type[BaseException]) -> type[BaseException]:
    return type(name, bases or (Exception,), {})


NotFound = named("DatasetNotFoundError", FileNotFoundError)


def caused(problem: BaseException, cause: BaseException) -> BaseException:
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    ("problem", "more", "message"),
    [
        (
            NotFound("Dataset 'owner/name' is a gated dataset on the Hub. Visit the page"),
            {},
            "access to the dataset must be asked for: owner/name\nhint: accept its terms",
        ),
        (
            caused(NotFound("x"), named("GatedRepoError")("403")),
            {},
            "access to the dataset must be asked for",
        ),
        (
            NotFound("Dataset 'owner/name' doesn't exist on the Hub or cannot be accessed."),
            {},
            "no such dataset, neither a file here nor on the hub: owner/name\nhint: check the name",
        ),
        (
            NotFound("Revision 'v9' doesn't exist for dataset 'owner/name' on the Hub."),
            {"revision": "v9"},
            "the dataset owner/name has no revision v9\nhint: leave out revision",
        ),
        (
            ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)"),
            {},
            "offline, and the dataset is not kept on this machine: owner/name\nhint: unset HF_HUB_",
        ),
        (
            ConnectionError("Couldn't reach 'owner/name' on the Hub (ConnectError)"),
            {},
            "the hub cannot be reached, and .*: owner/name\nhint: check the network",
        ),
        (
            ValueError(
                "Config name is missing.\nPlease pick one among the available configs: "
                "['main', 'socratic']\nExample of usage"
            ),
            {},
            "the dataset owner/name has several configurations; there are: main, socratic\n"
            "hint: dataset='{path: owner/name, name: main}'",
        ),
        (
            ValueError("BuilderConfig 'x' not found. Available: ['main', 'socratic']"),
            {"name": "x"},
            "the dataset owner/name has no configuration x; there are: main, socratic",
        ),
        (
            ValueError("Unknown split \"train\". Should be one of ['test', 'dev']."),
            {},
            "the dataset owner/name has no split train; there are: test, dev\n"
            "hint: dataset='{path: owner/name, split: test}'",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            {},
            "made by code of its own, which is never run\nhint: revision: refs/convert/parquet",
        ),
        (
            named("EmptyDatasetError", FileNotFoundError)("empty"),
            {"data_files": "*.csv"},
            r"the dataset owner/name has no data files that match \*\.csv",
        ),
        (
            named("DatasetGenerationCastError", named("DatasetsError"))("columns"),
            {},
            "the files of the dataset owner/name do not have the same columns",
        ),
        (
            named("DatasetGenerationError", named("DatasetsError"))("An error\noccurred"),
            {},
            "cannot load the dataset owner/name: An error occurred\nhint: download its files",
        ),
    ],
)
def test_what_goes_wrong_is_said_with_one_way_out(
    problem: BaseException, more: dict[str, Any], message: str, library: Any
) -> None:
    library(problem)
    pattern = message if r"\*" in message or ".*" in message else re.escape(message)
    with pytest.raises(DataError, match=pattern):
        open_rows(entry(**more))


def test_a_mistake_of_the_program_is_not_put_into_other_words(library: Any) -> None:
    library(AttributeError("oops"))
    with pytest.raises(AttributeError):
        open_rows(entry())


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(hub.importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"datasets library is needed .*\nhint: pip install datas"):
        open_rows(entry())
