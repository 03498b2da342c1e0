"""Large files of the model hub into its cache, so that a download that was broken off goes on.

The hub's client (2.4) begins a file anew that was not finished, and a model is a few files of
gigabytes. So these are fetched here, through the client's own functions, into the place in its
cache where it looks for finished files; all else is left to it.

    blobs/ETAG.incomplete  --grows, hashed while written-->  blobs/ETAG  <--snapshots/COMMIT/NAME

A file's ETag is its SHA-256: what went wrong on the way is found before anybody reads it. Threads
are daemons and look at `stop` with every piece: Ctrl-C waits for none of them.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roundpipe.durable import wait_for_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

AT_ONCE = 4  # files
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 50 * 1000**3  # bytes that the hub gives out in one file other than by its own protocol
_PIECE = 1 << 22
_PATIENCE = 10  # seconds
_END = 1.0  # seconds that threads get to end once somebody stops


class _StoppedError(Exception):
    """Somebody stops the download."""


def is_ours(path: Path) -> bool:
    """Whether a file is one that is gone on with; the client's own have another name each time."""
    return _SHA256.fullmatch(path.name.removesuffix(".incomplete")) is not None


class Downloads:
    """Fetches blobs of one repository at one commit into ``blobs`` of the hub's cache.

    ``url_of``: where a file is; ``progress`` is called with bytes that are there, from any thread.
    """

    def __init__(
        self,
        blobs: Path,
        url_of: Callable[[str], str],
        *,
        token: str | bool | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._blobs = blobs
        self._url_of = url_of
        self._token = token
        self._progress = progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}
        self._errors: list[BaseException] = []

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch files; blocks on the network. The first failure ends all, and is raised."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            waiting.put(name)
        threads = [
            threading.Thread(target=self._work, args=(waiting,), daemon=True, name=f"download-{i}")
            for i in range(min(AT_ONCE, len(names)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)  # so that a signal is seen
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_END)
        if self._errors:
            raise self._errors[0]

    def _work(self, waiting: queue.SimpleQueue[str]) -> None:
        while not self._stop.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._fetch_one(name)
            except _StoppedError:
                return
            except BaseException as error:  # raised again by `fetch`
                self._errors.append(error)
                self._stop.set()
                return

    def _fetch_one(self, name: str) -> None:
        from huggingface_hub import get_hf_file_metadata  # noqa: PLC0415 (imports late)
        from huggingface_hub.file_download import http_get  # noqa: PLC0415
        from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415

        url = self._url_of(name)
        found = get_hf_file_metadata(url, token=self._token, timeout=_PATIENCE)
        if not found.size or found.size > _LARGEST or not _SHA256.fullmatch(found.etag or ""):
            return  # the client's own way
        blob = self._blobs / str(found.etag)
        part = self._blobs / f"{found.etag}.incomplete"
        with _held(part) as file:
            if blob.exists():
                self._count(name, found.size)
                return
            hashed = _Hashed(file, self._stop, lambda size: self._count(name, size))
            start = hashed.read_what_is_there(found.size)
            if start < found.size:
                http_get(
                    url,
                    hashed,  # type: ignore[arg-type, unused-ignore]
                    resume_size=start,
                    headers=build_hf_headers(token=self._token),
                    expected_size=found.size,
                    displayed_filename=name,
                    tqdm_class=silent_bar(),
                )
            file.flush()
            if hashed.digest() != found.etag:
                part.unlink()
                raise OSError(
                    f"{name} came with errors and was thrown away; the same again fetches it anew"
                )
            part.replace(blob)

    def _count(self, name: str, size: int) -> None:
        with self._lock:
            self._done[name] = size
            if self._progress is not None:
                self._progress(sum(self._done.values()))


class _Hashed:
    """A file that is written to and hashed at once, as the client's ``http_get`` writes to it."""

    def __init__(self, file: Any, stop: threading.Event, progress: Callable[[int], None]) -> None:
        self._file, self._stop, self._progress = file, stop, progress
        self._hash = hashlib.sha256()
        self._size = 0

    def read_what_is_there(self, most: int) -> int:
        """Hash what an earlier try left; its bytes. More than the file should have is dropped."""
        self._file.seek(0)
        while piece := self._file.read(_PIECE):
            self._took(piece)
        if self._size > most:
            self.truncate(0)
        return self._size

    def write(self, piece: bytes) -> int:
        """Append."""
        self._file.write(piece)
        self._took(piece)
        return len(piece)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def seek(self, place: int) -> int:
        """Go to the beginning, which is the only way back that a download takes."""
        assert place == 0, place
        self._file.seek(0)
        return 0

    def truncate(self, size: int | None = None) -> int:
        """Begin anew: the server does not go on within a file."""
        self._file.seek(0)
        self._file.truncate(0)
        self._hash, self._size = hashlib.sha256(), 0
        return 0

    def digest(self) -> str:
        """SHA-256 of all of it."""
        return self._hash.hexdigest()

    def _took(self, piece: bytes) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self._hash.update(piece)
        self._size += len(piece)
        self._progress(self._size)


def silent_bar() -> Any:
    """A progress bar that shows nothing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415

    class Silent(tqdm):  # type: ignore[misc, unused-ignore]
        monitor_interval = 0  # else a thread of tqdm's own stays for good

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")  # read and written from outside

    return Silent


@contextmanager
def _held(path: Path) -> Iterator[Any]:
    """A file to read and write, waiting while another process fetches the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=True)
    with path.open("r+b") as file:
        wait_for_lock(file)
        yield file
