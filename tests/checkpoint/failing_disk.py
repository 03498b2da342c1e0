"""The file system as a test sees it: what was done, one operation after the other, and its end."""

from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path

BY_PATH = ("open", "mkdir", "rename", "replace", "unlink", "rmdir")
BY_FILE = ("pwrite", "fsync")


class Killed(BaseException):
    """The process is gone: from here on nothing is done any more, tidying up neither."""


class Disk:
    """Counts operations below ``root``; ``killed_at`` the n-th nothing happens any more.

    A write that is killed is done by half. ``full_from``: the n-th write and all later ones find no
    room. Whoever reads is not counted.
    """

    def __init__(self, monkeypatch, root):
        self.root = str(root)
        self.log = []
        self.killed_at = self.full_from = None
        self.num_writes = 0
        for name in (*BY_PATH, *BY_FILE):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self._opened(builtins.open))
        monkeypatch.setattr("io.open", builtins.open)

    def kill(self, when):
        raise Killed(when)

    def restart(self, *, killed_at=None, full_from=None):
        self.log.clear()
        self.num_writes = 0
        self.killed_at, self.full_from = killed_at, full_from

    def _watched(self, name, real):
        def watched(*args, **kwargs):
            is_mine = kwargs.get("dir_fd") is not None or self._is_mine(args[0])
            if name in BY_FILE or (is_mine and not self._reads(name, args)):
                self._count(name, args, real)
            return real(*args, **kwargs)

        return watched

    def _opened(self, real):
        def opened(file, mode="r", *args, **kwargs):
            if self._is_mine(file) and set(mode) & set("wax+"):
                self._count("open", (file,), None)
            return real(file, mode, *args, **kwargs)

        return opened

    def _is_mine(self, path):
        return isinstance(path, (str, Path)) and str(path).startswith(self.root)

    def _reads(self, name, args):
        return name == "open" and len(args) > 1 and not args[1] & (os.O_CREAT | os.O_WRONLY)

    def _count(self, name, args, real):
        number = len(self.log)
        if self.killed_at is not None and number >= self.killed_at:
            if number == self.killed_at and name == "pwrite":
                file, data, place = args
                real(file, data[: len(data) // 2], place)
            self.log.append((name, None))
            self.kill(f"at {number}: {name}")
        self.log.append((name, Path(args[0]).name if name in BY_PATH else None))
        if name == "pwrite":
            self.num_writes += 1
            if self.full_from is not None and self.num_writes > self.full_from:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
