"""Which files a dataset entry names, of what kind each is, and how its bytes are opened.

Kinds are told by the name, as the `datasets` library does, and so are the splits of a folder. A
file may be packed (.gz, .bz2, .xz, .zst) whatever its kind.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import re
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from roundpipe.errors import DataError
from roundpipe.finetune.data.card import listed
from roundpipe.finetune.settings.parse import near_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.finetune.settings.entry import DatasetEntry

KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_OTHERS = {
    ".xlsx": "a spreadsheet",
    ".xls": "a spreadsheet",
    ".zip": "an archive",
    ".tar": "an archive",
    ".tgz": "an archive",
    ".pkl": "a pickle",
    ".pt": "a pickle",
    ".npy": "an array",
    ".db": "a database",
    ".sqlite": "a database",
}
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SPLIT = re.compile(r"(?P<names>[\w-]+(\.[\w-]+)*(\+[\w-]+(\.[\w-]+)*)*)(\[(?P<rows>[^\]]*)\])?")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True)
class DataFile:
    """A file of rows. ``name``: as messages write it; ``kind``: a value of KINDS."""

    path: Path
    name: str
    kind: str
    packed: str = ""  # the suffix of what it is packed with

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Split:
    """What of a dataset is read: splits by name, of these the rows from ``start`` to ``stop``."""

    names: tuple[str, ...] = ("train",)
    start: int = 0
    stop: int | None = None


def is_hub_id(entry: DatasetEntry) -> bool:
    """Whether an entry can only be a dataset of the hub: nothing of that name is here."""
    path = Path(entry.path).expanduser()
    is_named_like_a_file = bool(_kind_of(path.name)[0]) or path.suffix.lower() in _OTHERS
    return (
        _HUB_ID.fullmatch(entry.path) is not None
        and not path.exists()
        and not (is_named_like_a_file or path.suffix.lower() in _PACKED)
    )


def split_of(entry: DatasetEntry) -> Split:
    """The split an entry asks for: ``train+test`` or ``train[:1000]``. Raises DataError."""
    if entry.split is None:
        return Split()
    found = _SPLIT.fullmatch(entry.split.replace(" ", ""))
    rows = found["rows"] if found else ""
    numbers = re.fullmatch(r"(\d*):(\d*)", rows) if rows else None
    if found is None or (rows and numbers is None):
        raise DataError(
            f"not a split of files: {entry.split}"
            "\nhint: split: train, split: train+validation, or split: 'train[:1000]'"
        )
    start, stop = (numbers[1], numbers[2]) if numbers else ("", "")
    return Split(tuple(found["names"].split("+")), int(start or 0), int(stop) if stop else None)


def find_files(entry: DatasetEntry) -> list[DataFile]:
    """The files of an entry that is no hub id, in the order in which they are read.

    Raises DataError where there is none, or none of a kind that is read.
    """
    path = Path(entry.path).expanduser()
    if path.is_dir():
        return _of_folder(entry, path)
    if path.exists():
        _require_whole(entry, path)
        return [_data_file(path, entry.path)]
    if any(mark in entry.path for mark in "*?["):
        return _matching(Path(path.anchor), [str(path.relative_to(path.anchor))], entry.path, "")
    if "://" in entry.path:
        raise DataError(
            f"not a file of this machine: {entry.path}\nhint: download it; dataset=FILE"
        )
    raise DataError(f"no such dataset file: {entry.path}\nhint: {near_file(path)}")


def _require_whole(entry: DatasetEntry, file: Path) -> None:
    """Raise DataError for a split of one file, which is the whole of it whatever its split's name.

    Two entries that name two splits of the same file would train on what they evaluate on.
    """
    for name in split_of(entry).names:
        if name not in ("train", _split_in(Path(file.name), name)):
            raise DataError(
                f"one file has no splits: {entry.path}, split: {name}"
                "\nhint: leave split out, or take some of the rows: split: 'train[:1000]'"
            )


def _of_folder(entry: DatasetEntry, folder: Path) -> list[DataFile]:
    split = split_of(entry)
    if entry.data_files is not None:
        return _matching(folder, list(entry.data_files), entry.path, entry.path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        from roundpipe.finetune.data.saved import saved_files  # noqa: PLC0415, rarely needed

        return [_data_file(file, str(file)) for file in saved_files(folder, split.names)]
    where = listed(folder, entry.name, split.names)
    if where.patterns is not None:
        return _matching(where.folder, where.patterns, entry.path, entry.path)
    return _in_folder(entry, where.folder, split)


def _in_folder(entry: DatasetEntry, folder: Path, split: Split) -> list[DataFile]:
    """The files of one split, if the folder has splits, else all of it."""
    found = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and _kind_of(file.name)[0]
        and file.name not in _NO_DATA
        and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    ]
    found = _one_kind(found, entry.path)
    chosen = [file for name in split.names for file in _in_split(found, folder, name, entry.path)]
    return [_data_file(file, str(file)) for file in chosen]


def _one_kind(found: list[Path], given: str) -> list[Path]:
    """Text files beside rows are notes; two kinds of rows may be the same rows twice."""
    kinds = {_kind_of(file.name)[0] for file in found}
    if len(kinds) > 1:
        kinds.discard("text")
    if not kinds:
        raise DataError(f"no data files in the folder: {given}\nhint: {_readable()}")
    if len(kinds) > 1:
        names = ", ".join(sorted({_suffix_of(file.name) for file in found}))
        raise DataError(
            f"files of several kinds in the folder: {given} has {names}"
            f"\nhint: dataset='{{path: {given}, data_files: \"*{_suffix_of(found[0].name)}\"}}'"
        )
    return [file for file in found if _kind_of(file.name)[0] in kinds]


def _in_split(found: list[Path], folder: Path, wanted: str, given: str) -> list[Path]:
    """The files of one split, by words in their names or folders, as the hub has them."""
    of = {file: _split_in(file.relative_to(folder), wanted) for file in found}
    if not any(of.values()):
        if wanted == "train":
            return found  # no name says anything: all of it is trained on
    elif chosen := [file for file in found if of[file] == wanted]:
        return chosen
    known = sorted({name for name in of.values() if name}) or ["train"]
    raise DataError(
        f"no split {wanted} in the folder: {given}; there are: {', '.join(known)}"
        f"\nhint: dataset='{{path: {given}, split: {known[0]}}}', or data_files: '*'"
    )


def _split_in(path: Path, wanted: str) -> str | None:
    """The split that a file belongs to by its name, else by its innermost folder that says one."""
    for part in (path.name, *reversed(path.parts[:-1])):
        words = re.split(r"[-._ 0-9]+", part.lower())
        if wanted.lower() in words or part.startswith(f"{wanted}-"):
            return wanted
        for name, spellings in _SPLIT_WORDS.items():
            if any(word in spellings for word in words):
                return name
    return None


def _matching(folder: Path, patterns: list[str], given: str, prefix: str) -> list[DataFile]:
    found: list[DataFile] = []
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise DataError(f"data_files outside of the folder: {pattern}\nhint: path: {pattern}")
        matches = [file for file in sorted(folder.glob(pattern)) if file.is_file()]
        if not matches:
            raise DataError(
                f"no file matches: {Path(prefix, pattern) if prefix else given}"
                f"\nhint: {near_file(folder / pattern)}"
            )
        found += [_data_file(file, str(file)) for file in matches]
    return list(dict.fromkeys(found))


def _data_file(path: Path, name: str) -> DataFile:
    kind, packed = _kind_of(path.name)
    if kind:
        return DataFile(path, name, kind, packed)
    suffix = path.suffix.lower()
    if suffix in _OTHERS:
        raise DataError(
            f"{_OTHERS[suffix]}, not a file of rows: {name}\nhint: save it as .csv or .jsonl"
        )
    raise DataError(f"unknown kind of file: {name}\nhint: {_readable()}")


def _kind_of(name: str) -> tuple[str, str]:
    """(kind or "", suffix of the packing or "")."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in _PACKED else ""
    return KINDS.get(suffixes[-1] if suffixes else "", ""), packed


def _suffix_of(name: str) -> str:
    stem = Path(name).stem if _kind_of(name)[1] else name
    return Path(stem).suffix


def _readable() -> str:
    return f"one of {', '.join(KINDS)}, and {', '.join(_PACKED)} of these"


@contextlib.contextmanager
def opened(file: DataFile, show: Callable[[int], None]) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file; ``show`` is told how many of the packed ones are read.

    Raises DataError where the file cannot be opened or what it is packed in is damaged.
    """
    try:
        with (
            io.BufferedReader(_Counted(file.path, show), 1 << 18) as plain,
            contextlib.closing(_unpack(file, plain)) as stream,
        ):
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as problem:
        raise _damaged(file, problem) from problem
    except OSError as problem:
        if file.packed and problem.errno is None:  # what bz2 and zst raise
            raise _damaged(file, problem) from problem
        why = (problem.strerror or str(problem)).lower()
        raise DataError(f"cannot read: {file.name}: {why}\nhint: check the file") from problem


@contextlib.contextmanager
def unpacked(file: DataFile, show: Callable[[int], None]) -> Iterator[Path | IO[bytes]]:
    """The same as something that can be read in any order: the file, or a copy of what is in it."""
    if not file.packed:
        yield file.path
        return
    with opened(file, show) as stream, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.seek(0)
        yield copy


def _damaged(file: DataFile, problem: Exception) -> DataError:
    kind = {".gz": "gzip", ".zst": "zstd"}.get(file.packed, file.packed.lstrip("."))
    why = str(problem).partition("\n")[0].lower()[:100]
    return DataError(f"damaged {kind} file: {file.name}: {why}\nhint: copy it or compress it again")


class _Counted(io.FileIO):
    """A file that says how far it was read, once a megabyte."""

    def __init__(self, path: Path, show: Callable[[int], None]) -> None:
        super().__init__(path)
        self._show = show
        self._told = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        position = self.tell()
        if position - self._told >= 1 << 20:
            self._told = position
            self._show(position)
        return count


def _unpack(file: DataFile, plain: IO[bytes]) -> IO[bytes]:
    if file.packed == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=plain))
    if file.packed == ".bz2":
        return bz2.BZ2File(plain)
    if file.packed == ".xz":
        return lzma.LZMAFile(plain)
    if file.packed == ".zst":
        arrow = import_arrow(file.name)
        return io.BufferedReader(arrow.CompressedInputStream(plain, "zstd"))
    return plain


def import_arrow(name: str) -> Any:
    """The pyarrow module. Raises DataError where it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as problem:
        raise DataError(
            f"pyarrow is needed to read: {name}\nhint: pip install pyarrow"
        ) from problem
