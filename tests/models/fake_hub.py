"""A model hub on this machine: repositories are folders, errors are those the real one sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class FakeHub:
    """``repos``: folders by id. ``refuse``: status and error code for all that asks. ``log``: what
    was asked. ``cut``: only so many bytes of a weight file are sent, then the line is cut."""

    endpoint: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    refuse: tuple[int, str] | None = None
    refuse_files: tuple[int, str] | None = None
    cut: int | None = None
    ranges: bool = True
    log: list[str] = field(default_factory=list)

    def files(self, repo: str) -> dict[str, Path]:
        folder = self.repos[repo]
        return {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def _oid(path: Path) -> str:
    """The SHA-256 of what is large there, as the real one says it; of the rest any name."""
    kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
    return kind(path.read_bytes()).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append(f"{self.command} {path}")
        if self.hub.refuse is not None:
            return self._send(*self.hub.refuse)
        if found := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?/?", path):
            return self._api(*found.groups())
        if found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            return self._file(*found.groups())
        return self._send(404, "EntryNotFound")

    def _known(self, repo: str, revision: str | None) -> str | None:
        if repo not in self.hub.repos:
            self._send(401, "RepoNotFound")
            return None
        commit = self.hub.commits.get(repo, COMMIT)
        if revision not in (None, "main", commit):
            self._send(404, "RevisionNotFound")
            return None
        return commit

    def _api(self, repo: str, kind: str | None, revision: str | None) -> None:
        commit = self._known(repo, revision)
        if commit is None:
            return None
        files = self.hub.files(repo)
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _oid(path)}
                for name, path in files.items()
            ]
            return self._send(200, body=json.dumps(tree).encode())
        siblings = [{"rfilename": n, "size": p.stat().st_size} for n, p in files.items()]
        info = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}
        return self._send(200, body=json.dumps(info).encode())

    def _file(self, repo: str, revision: str, name: str) -> None:
        commit = self._known(repo, revision)
        if commit is None:
            return None
        if self.hub.refuse_files is not None:
            return self._send(*self.hub.refuse_files)
        path = self.hub.files(repo).get(name)
        if path is None:
            return self._send(404, "EntryNotFound")
        body, headers = path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{_oid(path)}"'}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        asked = asked if self.hub.ranges else None
        start = int(asked[1]) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.hub.log.append(f"RANGE {name} from {start}")
        short = self.hub.cut if name.endswith(".safetensors") else None
        return self._send(206 if asked else 200, body=body[start:], headers=headers, cut=short)

    def _send(
        self,
        status: int,
        code: str = "",
        *,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None and self.command != "HEAD":
            self.close_connection = True


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers while the block runs."""
    hub = FakeHub()
    handler = type("Answers", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
