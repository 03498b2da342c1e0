"""Builds `kernel.cpp` with the machine's own C++ compiler, once, and finds it again next time.

The library lies in a folder of the user's cache under a name made of all that its bits depend on:
source, flags, compiler and processor. It becomes machine code in this process, so:

1. The folder belongs to this user and nobody else may write there; it is made that way or not used.
2. A library appears under its name complete or not at all: it is built beside and renamed. Several
   processes may build at once; each gets a whole one, all alike.
3. Where no such folder can be had, it is built in a temporary one, for this process alone.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from roundpipe.optim.compiled import Kernel, KernelError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.cpp")
COMPILERS = ("c++", "g++", "clang++")
# Neither flag about mathematics changes a result: they say that nobody looks at errno or traps.
# No multiply-adds but those written out: else the same element differs between loops.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
         "-fPIC", "-shared", "-pthread")  # fmt: skip
NATIVE = "-march=native"
_BUILD_SECONDS = 300.0


@functools.cache
def kernel() -> Kernel | KernelError:
    """This process's compiled update, or why there is none; builds it at the first call.

    Building takes a few seconds, finding it again a millisecond.
    """
    try:
        return load_kernel(_home_folder(), find_compiler())
    except KernelError as error:
        return error


def find_compiler() -> Path:
    """The C++ compiler to use; raises KernelError if there is none."""
    for name in COMPILERS:
        if found := shutil.which(name):
            return Path(found)
    raise KernelError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")


def load_kernel(folder: Path | None, compiler: Path) -> Kernel:
    """The library for this machine out of ``folder``, built with ``compiler`` if not there yet.

    ``folder`` None, or one that cannot be trusted or written: a temporary one, said in the log.
    Raises KernelError with the compiler's first error, or why the library cannot be loaded.
    """
    name = _name(compiler)
    if folder is not None:
        path = folder / name
        try:
            _make_private(folder)
            if not _is_ours(path):
                _build(compiler, folder, path)
            return _load(path)
        except OSError as error:
            logger.info("the optimizer's kernel is built for this process only: %s", error)
    with tempfile.TemporaryDirectory(prefix="roundpipe-", ignore_cleanup_errors=True) as own:
        path = Path(own, name)
        _build(compiler, Path(own), path)
        return Kernel(path)  # stays loaded when the file goes


def _load(path: Path) -> Kernel:
    """Load it; a file that cannot be loaded is removed and an OSError raised."""
    try:
        return Kernel(path)
    except KernelError as error:
        path.unlink(missing_ok=True)
        raise OSError(str(error)) from error


def _home_folder() -> Path | None:
    try:
        return Path.home() / ".cache" / "roundpipe" / "kernels"
    except RuntimeError:  # a user without a home
        return None


def _name(compiler: Path) -> str:
    """A file name of all that the library's bits depend on."""
    real = compiler.resolve()
    about = real.stat()
    parts = (
        hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        " ".join((NATIVE, *FLAGS)),
        f"{real} {about.st_size} {about.st_mtime_ns}",
        _processor(),
    )
    return f"optimizer-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.so"


def _processor() -> str:
    """What ``-march=native`` looks at: model and instruction sets."""
    lines: list[str] = []
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
        keys = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
        lines = [line for line in text.splitlines() if line.partition(":")[0].strip() in keys]
    except OSError:
        pass
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *lines))


def _make_private(folder: Path) -> None:
    """Make ``folder`` if need be; raises OSError unless it is this user's and closed to others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != _user():
        raise PermissionError(f"not a folder of this user: {folder}")
    if about.st_mode & 0o022:
        raise PermissionError(f"others may write there: {folder}")


def _is_ours(path: Path) -> bool:
    """Whether the library is there; a file that is not this user's is not."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid == _user()


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _build(compiler: Path, folder: Path, path: Path) -> None:
    logger.info("building the optimizer's kernel with %s: a few seconds, once", compiler.name)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as own:
        made = Path(own, path.name)
        # Without -march=native where a compiler does not know it.
        error = _compile(compiler, (NATIVE, *FLAGS), made)
        if error and _compile(compiler, FLAGS, made):
            raise KernelError(f"{compiler.name} failed: {error}")
        made.chmod(0o700)
        made.replace(path)


def _compile(compiler: Path, flags: tuple[str, ...], made: Path) -> str:
    """Empty if done, else the compiler's first error."""
    command = [str(compiler), *flags, str(SOURCE), "-o", str(made)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and made.exists():
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "error" in line.lower()), lines[0])
