"""Rules about the tree itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))
OUR_CODE = [
    *FILES,
    *(
        path
        for folder in ("tests", "benchmarks", "scripts", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
PAPERS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Put together here so that this file does not hold what it forbids.
PLACES = re.compile("/" + "work/|/" + "tmp/|/" + "opt/|/" + "home/|/" + "root/")
REGISTRIES = re.compile("py" + r"pi\.org|files\.python" + r"hosted|regis" + r"try\.npm")
PEOPLE = re.compile(r"\bsit" + r"ting\b|\bissue #?\d|\bcl" + r"aude\b|\banth" + r"ropic\b", re.I)

IMPORT_ALL = """
import importlib, logging, pkgutil, sys, threading, torch, roundpipe.store.build
from roundpipe.store.packed import pack
assert "bitsandbytes" not in sys.modules  # waits for its first use
how, parts = pack("w", torch.ones(2, 64))
how.unpack(parts)
assert not logging.getLogger("bitsandbytes.backends.cpu.ops").filters
for module in pkgutil.walk_packages(roundpipe.__path__, "roundpipe."):
    importlib.import_module(module.name)
for name in roundpipe.__all__:
    getattr(roundpipe, name)
assert threading.active_count() == 1, threading.enumerate()
assert not torch.cuda.is_initialized()
"""

HELP = """
import sys
from roundpipe.cli import main
sys.argv = ["roundpipe", "--help"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
slow = {"torch", "numpy", "transformers", "peft", "datasets", "huggingface_hub", "matplotlib"}
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter for which a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_everything_starts_no_thread_prints_nothing_and_touches_no_device() -> None:
    done = run_python(IMPORT_ALL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_the_package_does_not_import_torch() -> None:
    done = run_python("import sys, roundpipe; dir(roundpipe); assert 'torch' not in sys.modules")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("room", ["plan", "sim"])
def test_plan_and_sim_run_without_torch_and_threading(room: str) -> None:
    # `threading` itself is there already: the interpreter's own modules import it.
    done = run_python(
        f"import sys, pkgutil, importlib, roundpipe.{room} as room\n"
        f"for module in pkgutil.walk_packages(room.__path__, 'roundpipe.{room}.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'torch' not in sys.modules"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_answers_without_what_is_slow_to_import() -> None:
    done = run_python(HELP)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_a_file_has_at_most_400_lines_and_a_function_60() -> None:
    too_long = []
    for path in FILES:
        text, name = path.read_text(), path.relative_to(SRC)
        if text.count("\n") > 400:
            too_long.append(str(name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 60:
                    too_long.append(f"{name}:{node.lineno}: {node.name}")
    assert not too_long


def test_a_module_says_what_it_is_for_and_is_named_after_it() -> None:
    silent = [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "no module docstring"
    nouns = {"utils", "util", "common", "helpers", "manager", "base", "misc"}
    assert not [path for path in FILES if path.stem in nouns]


def test_code_and_papers_name_no_place_and_no_person() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in (*OUR_CODE, *PAPERS)
        for rule in (PLACES, REGISTRIES, PEOPLE)
        if (found := rule.search(path.read_text()))
    ]
    assert not named


def test_a_link_in_a_paper_leads_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in PAPERS
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
        if not target.startswith(("http://", "https://", "mailto:"))
        and not (path.parent / target).exists()
    ]
    assert not dead


def test_tests_lie_in_rooms_named_after_those_of_the_source() -> None:
    across = {"numbers", "e2e", "accept", "published"}  # what several rooms must get right together
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - across
    assert {room for room in rooms if not (SRC / "roundpipe" / room).is_dir()} == set()


@pytest.mark.parametrize("room", ["trainer", "use", "output", "run"])
def test_the_map_of_a_room_names_each_of_its_files_and_no_other(room: str) -> None:
    folder = SRC / "roundpipe" / "finetune" / room
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert told is not None
    assert not files - set(re.findall(r"\w+", told))
    first = [re.split(r"  +", line.strip())[0] for line in told.splitlines()[2:]]
    listed = {name for names in first for name in names.split(", ") if re.fullmatch(r"\w+", name)}
    assert not listed - files
