"""Makes the two modules beside this one known, and prints what was compared when all has run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FOUND = FOLDER / "found.json"


def module(name):
    """A module of this folder, imported once, under a name that no other has."""
    full = f"roundpipe_architectures_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


def pytest_generate_tests(metafunc):
    """``row``: those of the spread, or with ``accept`` all the others."""
    if "row" not in metafunc.fixturenames:
        return
    _, rows = module("tiny").catalogue()
    marks = {False: [pytest.mark.accept], True: []}
    chosen = [pytest.param(row, id=row.name, marks=marks[row.spread]) for row in rows.values()]
    metafunc.parametrize("row", chosen)


@pytest.fixture(scope="session")
def tiny_models():
    """The catalogue, and models from it."""
    return module("tiny")


@pytest.fixture(scope="session")
def comparing():
    """How a wrapped model is compared with a plain one."""
    return module("comparing")


@pytest.fixture(scope="session")
def found_before():
    """What earlier runs have compared, by row."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


@pytest.fixture(scope="session")
def record(request, found_before):
    """``record(name, entry)``; printed when all has run, written down with --update-golden."""
    found = {}
    yield found.__setitem__
    lines = [f"{name:28}{describe(entry)}" for name, entry in sorted(found.items())]
    sys.stdout.write("\n".join((f"\n{len(lines)} architectures", *lines, "")))  # seen with -s
    if request.config.getoption("--update-golden"):
        _, rows = module("tiny").catalogue()
        kept = {name: e for name, e in {**found_before, **found}.items() if name in rows}
        lines = [f"{json.dumps(n)}: {json.dumps(entry)}" for n, entry in sorted(kept.items())]
        FOUND.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def describe(entry):
    """One line of the list."""
    if "refused" in entry:
        return f"refused: {entry['refused']}"
    made = [f"{name}: {result}" for name, result in entry["compared"].items() if result]
    return f"{entry['class']}; {'; '.join(made)}"
