"""One entry of a dataset, from its files to samples on disk.

files → rows → columns mapped, shape checked → text and spans → tokens → cut → written

Where the entry's tokens are kept already nothing of that happens.
"""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.account import Account
from roundpipe.finetune.data.cache import REJECTED, TokenCache
from roundpipe.finetune.data.encode import has_doubled_bos, prepare, tokenize
from roundpipe.finetune.data.problems import BadRows, Place, placed
from roundpipe.finetune.data.rows import open_rows, read_rows
from roundpipe.finetune.data.samples import Sample
from roundpipe.finetune.data.shapes import (
    map_columns,
    map_roles,
    shape_of,
    understand,
    unused_columns,
)
from roundpipe.finetune.data.spans import Rendered
from roundpipe.finetune.data.tokens import TokenWriter
from roundpipe.finetune.data.versions import tokenizer_digest, tokens_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from roundpipe.finetune.data.rows import Row, RowSource
    from roundpipe.finetune.data.samples import Part
    from roundpipe.finetune.data.shapes import Tokens
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

    Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

_CHUNK = 256  # rows that go to the tokenizer at once
_CHUNK_SIZE = 1 << 22  # characters or tokens of them
_MOST = 0.5  # share of rows that cannot be used from which the run stops


@dataclass(frozen=True)
class Tokenizing:
    """How rows become tokens, and where these go.

    ``cache``: where they are kept; without it, or where it is full, they last as long as the
    process, near ``folder``. ``counting(what, total)`` gives a function to show progress with.
    """

    config: TrainConfig
    tokenizer: Any
    cache: TokenCache | None
    folder: Path | None
    counting: Counting

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 of what the tokenizer does; takes a third of a second for a large one."""
        return tokenizer_digest(self.tokenizer)


class _Piece(NamedTuple):
    """What is to be tokenised for one sample: of which row, and where that stands."""

    place: Place
    row: int
    ready: Rendered | Tokens


@dataclass(frozen=True)
class EntrySamples:
    """The samples of an entry. ``rejected``: bytes of the rows that were skipped, JSON lines."""

    entry: DatasetEntry
    part: Part
    account: Account
    rejected: Path | IO[bytes] | None
    was_kept: bool


def samples_of(entry: DatasetEntry, how: Tokenizing) -> EntrySamples:
    """Read and tokenise an entry, or find its tokens. Blocks.

    Raises DataError for rows or files that cannot be used, ConfigError for a template that cannot
    be trained with.
    """
    with how.counting(f"finding {entry.path}", 0):  # it may have to be downloaded
        source = open_rows(entry)
    if how.cache is None:
        return _in_passing(entry, source, how)
    with how.counting(f"checking {entry.path}", source.num_bytes) as show:
        content = _digests(source, how.cache, show)
        key = tokens_key(entry, how.config, how.tokenizer_digest, content)
    if kept := how.cache.find(key):
        account = Account.from_json(kept.account)
        return EntrySamples(entry, kept.part, account, kept.rejected, was_kept=True)
    try:
        with how.cache.making(key) as making, _rejects(how, making.folder) as rejects:
            account = _read(entry, source, how, making.writer, rejects)
            making.account = account.to_json()
    except OSError as problem:
        raise _no_room(how.cache.folder, problem) from problem
    kept = how.cache.find(key)
    if kept is None:  # somebody removes what we write
        return _in_passing(entry, source, how)
    return EntrySamples(entry, kept.part, account, kept.rejected, was_kept=False)


def _digests(source: RowSource, cache: TokenCache, show: Callable[[int], None]) -> list[Any]:
    """What the rows hang on: the content of the files, and how they are read."""
    digests, before = [], 0
    for path in source.paths:
        digests.append(cache.digest_of_file(path, partial(_show_from, show, before)))
        before += path.stat().st_size
    return [source.manner, digests]


def _show_from(show: Callable[[int], None], start: int, read: int) -> None:
    show(start + read)


def _in_passing(entry: DatasetEntry, source: RowSource, how: Tokenizing) -> EntrySamples:
    """Samples in files without a name, which nobody finds again."""
    near = how.folder if how.folder is not None and how.folder.is_dir() else None
    try:
        with contextlib.ExitStack() as open_files:
            writer = open_files.enter_context(TokenWriter(None, near=near))
            rejects = None
            if _skips(how) and how.folder is not None:
                rejects = open_files.enter_context(tempfile.TemporaryFile(dir=near))
            account = _read(entry, source, how, writer, rejects)
            part = writer.mapped()
            if rejects is not None:  # read and closed once all entries are there
                open_files.pop_all()
                writer.close()
            return EntrySamples(entry, part, account, rejects, was_kept=False)
    except OSError as problem:
        raise _no_room(near or Path(tempfile.gettempdir()), problem) from problem


def _skips(how: Tokenizing) -> bool:
    return how.config.on_bad_line == "skip"


@contextlib.contextmanager
def _rejects(how: Tokenizing, folder: Path) -> Iterator[IO[bytes] | None]:
    if not _skips(how):
        yield None
        return
    with (folder / REJECTED).open("wb") as file:
        yield file


def _no_room(folder: Path, problem: OSError) -> DataError:
    why = (problem.strerror or str(problem)).lower()
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"tokens cannot be written: {folder}: {why}\nhint: dataset_prepared_path=FOLDER"
        f"{' with more room' if full else ' that can be written'}"
    )


def _read(
    entry: DatasetEntry,
    source: RowSource,
    how: Tokenizing,
    writer: TokenWriter,
    rejects: IO[bytes] | None,
) -> Account:
    """All usable samples of an entry into ``writer``, in the order of the files."""
    account = Account()
    bad = BadRows(skip=_skips(how), rejects=rejects)
    with how.counting(f"tokenising {entry.path}", source.num_bytes) as show:
        rows = read_rows(entry, report=bad.add, show=show, source=source)
        try:
            for chunk in _chunks(_prepared(rows, entry, how, bad, account)):
                writer.add(*_fitting(chunk, how, account))
        except DataError as problem:
            if not bad.must_stop:
                raise
            bad.end_with(problem, entry.path)
    bad.check()
    account.rows += bad.count
    account.num_skipped, account.skipped = bad.count, bad.first
    if bad.count > _MOST * account.rows:
        raise DataError(
            f"most rows cannot be used: {bad.count:,} of {account.rows:,} of {entry.path}; "
            f"the first: {bad.first[0]}\nhint: on_bad_line=stop lists them"
        )
    return account


def _prepared(
    rows: Iterator[Row], entry: DatasetEntry, how: Tokenizing, bad: BadRows, account: Account
) -> Iterator[_Piece]:
    """Rows up to the tokenizer; after a bad one they are only looked at."""
    shape: str | None = None
    for row in rows:
        if bad.has_seen_enough():
            return
        try:
            mapped = map_columns(row.values, entry.columns, wanted=entry.type)
            mapped = map_roles(mapped, entry.roles) if entry.roles else mapped
            if shape is None:
                shape = shape_of(mapped, wanted=entry.type)
                account.shape, account.unused = shape, unused_columns(shape, mapped)
            shape_of(mapped, wanted=shape)
            if bad.must_stop:
                understand(mapped, shape)
                continue
            ready = prepare(mapped, shape, how.tokenizer, how.config)
        except ConfigError as problem:
            found = placed(problem, row.place)
            if not isinstance(found, DataError) or (shape is None and not bad.skip):
                raise found from problem
            bad.add(found, row.place, row.raw or _as_json(row))
            continue
        account.rows += 1
        account.split += len(ready) - 1
        account.note_odd(ready)
        for each in ready:
            yield _Piece(row.place, account.rows, each)


def _as_json(row: Row) -> bytes:
    return json.dumps(row.values, default=str, ensure_ascii=False).encode("utf-8", "replace")


def _chunks(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    chunk: list[_Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        ready = piece.ready
        size += len(ready.text if isinstance(ready, Rendered) else ready.input_ids)
        if len(chunk) == _CHUNK or size > _CHUNK_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _fitting(
    chunk: Sequence[_Piece], how: Tokenizing, account: Account
) -> tuple[list[Sample], list[int]]:
    """The samples of a chunk after truncation, without those that teach nothing, and their rows."""
    kept, rows = [], []
    limit, truncation = how.config.max_length, how.config.truncation
    samples = tokenize([piece.ready for piece in chunk], how.tokenizer)
    for piece, whole in zip(chunk, samples, strict=True):
        sample = whole
        if len(whole) > limit:
            if truncation == "error":
                raise DataError(
                    f"longer than max_length {limit:,}: {len(whole):,} tokens ({piece.place})"
                    "\nhint: truncation=cut, or truncation=drop"
                )
            if truncation == "drop":
                account.dropped += 1
                continue
            account.cut += 1
            sample = Sample(whole.input_ids[:limit], whole.labels[:limit])
        if sample.num_trained == 0:
            account.lost += 1
            continue
        account.doubled_bos += has_doubled_bos(sample, how.tokenizer)
        kept.append(sample)
        rows.append(piece.row)
    return kept, rows
