import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest

from roundpipe.errors import ConfigError
from roundpipe.optim import build, execution
from roundpipe.optim.build import find_compiler, kernel, load_kernel
from roundpipe.optim.compiled import Kernel, KernelError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its compilers are shell scripts")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """A library really built here, of which the fake compilers below hand out copies."""
    found = kernel()
    if not isinstance(found, Kernel):
        pytest.skip(f"no compiled update on this machine: {found}")
    if found.path.exists():
        return found.path
    copy = tmp_path_factory.mktemp("kernel") / "kernel.so"
    build._build(find_compiler(), copy.parent, copy)
    return copy


@pytest.fixture
def compiler(tmp_path, library):
    """``compiler(script)``: one that notes its call and runs ``script``, "$out" its output."""

    def made(script=""):
        path = tmp_path / "fake-c++"
        path.write_text(
            f'#!/bin/sh\nfor out; do :; done\necho "$*" >> {tmp_path}/calls\n'
            f"{script or f'cp {library} $out'}\n"
        )
        path.chmod(0o700)
        return path

    return made


def calls(tmp_path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_it_is_built_once_and_found_again(tmp_path, compiler):
    folder = tmp_path / "cache" / "kernels"
    first = load_kernel(folder, compiler())
    second = load_kernel(folder, tmp_path / "fake-c++")
    assert first.path == second.path
    assert os.listdir(folder) == [first.path.name]
    (command,) = calls(tmp_path)
    assert "-ffp-contract=off" in command
    assert "fast-math" not in command
    assert folder.stat().st_mode & 0o777 == 0o700
    assert first.path.stat().st_mode & 0o077 == 0


def test_another_compiler_source_or_processor_is_another_library(tmp_path, compiler, monkeypatch):
    path = compiler()
    names = {build._name(path)}
    path.write_text(path.read_text() + "# newer\n")
    names.add(build._name(path))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    names.add(build._name(path))
    monkeypatch.setattr(build, "FLAGS", ("-O2",))
    names.add(build._name(path))
    source = tmp_path / "kernel.cpp"
    source.write_text("// another")
    monkeypatch.setattr(build, "SOURCE", source)
    names.add(build._name(path))
    assert len(names) == 5


def test_a_failed_build_leaves_nothing_and_says_the_compilers_first_error(tmp_path, compiler):
    broken = compiler(
        'echo half > "$out"; echo "kernel.cpp: In function f:" >&2; '
        'echo "kernel.cpp:7: error: no such thing" >&2; exit 1'
    )
    with pytest.raises(KernelError, match=r"fake-c\+\+ failed: kernel.cpp:7: error: no such thing"):
        load_kernel(tmp_path / "cache", broken)
    assert os.listdir(tmp_path / "cache") == []


def test_a_compiler_that_does_not_know_this_processor_builds_without(tmp_path, compiler):
    script = compiler().read_text().splitlines()[-1]
    picky = compiler(f'case "$*" in *native*) echo "error: native?" >&2; exit 1;; esac\n{script}')
    assert isinstance(load_kernel(tmp_path / "cache", picky), Kernel)
    assert len(calls(tmp_path)) == 2


def folder_of_someone_else(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_user", lambda: -1)
    return tmp_path / "cache"


def folder_open_to_others(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    return tmp_path / "cache"


def folder_that_is_a_link(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "cache"


def folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


@pytest.mark.parametrize(
    "folder",
    [
        folder_of_someone_else,
        folder_open_to_others,
        folder_that_is_a_link,
        folder_that_cannot_be_made,
    ],
)
def test_a_folder_that_cannot_be_trusted_is_not_used(
    tmp_path, compiler, monkeypatch, caplog, folder
):
    path = folder(tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO):
        found = load_kernel(path, compiler())
    assert isinstance(found, Kernel)
    assert not found.path.exists()  # a temporary folder's
    assert "for this process only" in caplog.text
    assert not path.is_dir() or os.listdir(path) == []


def test_a_file_that_is_no_library_is_replaced(tmp_path, compiler, caplog):
    folder, path = tmp_path / "cache", compiler()
    folder.mkdir(mode=0o700)
    name = folder / build._name(path)
    name.write_bytes(b"not a library")
    with caplog.at_level(logging.INFO):
        assert isinstance(load_kernel(folder, path), Kernel)
    assert "cannot be loaded" in caplog.text
    assert not name.exists()
    assert load_kernel(folder, path).path == name


def test_two_may_build_at_once(tmp_path, compiler):
    folder = tmp_path / "cache"
    slow = compiler()
    # Each waits for the other to have begun.
    lines = slow.read_text().splitlines()
    wait = f'while [ "$(wc -l < {tmp_path}/calls)" -lt 2 ]; do sleep 0.01; done'
    slow.write_text("\n".join([*lines[:-1], wait, lines[-1], ""]))
    found = []
    both = [
        threading.Thread(target=lambda: found.append(load_kernel(folder, slow))) for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(calls(tmp_path)) == 2
    assert len({one.path for one in found}) == 1
    assert os.listdir(folder) == [found[0].path.name]


# ---- what is told


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(execution, "kernel", kernel.__wrapped__)


def test_without_a_compiler_auto_is_chunks_with_a_warning(without_compiler, caplog):
    assert execution.resolve("auto") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler: none of c++, g++, clang++ is on the path" in record.getMessage()


def test_chunks_that_were_asked_for_are_no_warning(without_compiler, caplog):
    assert execution.resolve("chunks") is None
    assert not caplog.records


def test_compiled_that_cannot_be_had_is_refused_with_the_way_out(without_compiler):
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler: .*\nhint: implementation='auto'"):
        execution.resolve("compiled")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ConfigError, match="must be auto, compiled or chunks: fast"):
        execution.resolve("fast")


def test_the_source_compiles_without_a_warning(tmp_path, library):
    command = [find_compiler(), "-std=c++17", "-O0", "-Wall", "-Wextra", "-fsyntax-only"]
    done = subprocess.run([*command, build.SOURCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
