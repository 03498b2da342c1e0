"""Each guide is followed from top to bottom in an empty folder, as a stranger would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pages import all_blocks, as_script, guides

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.accept

# In place of pip: what a page says to install must be installed here, and nothing is fetched.
PIP = r"""#!{python}
import sys
from importlib.metadata import distribution
from pathlib import Path
words = [word for word in sys.argv[2:] if not word.startswith("-")]
for word in words:
    name = word.split("[")[0].split("=")[0].split("<")[0].split(">")[0]
    if name not in ("", ".") and not Path(name).exists():
        distribution(name)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Mapping[str, str]:
    """The environment of somebody who has installed the package and nothing else."""
    home, programs = tmp_path / "home", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()
    pip = programs / "pip"
    pip.write_text(PIP.replace("{python}", sys.executable))
    pip.chmod(0o755)
    here = Path(sys.executable).parent
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TERM") if name in os.environ}
    return kept | {
        "PATH": f"{programs}:{here}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", guides(), ids=lambda page: page.stem)
def test_a_page_can_be_followed_in_an_empty_folder(
    page: Path, tmp_path: Path, reader: Mapping[str, str]
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    script = tmp_path / "page.sh"
    script.write_text(as_script(page, sys.executable))
    done = subprocess.run(
        ["bash", str(script)],
        cwd=folder,
        env=reader,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    sys.stdout.write(done.stdout[-4000:])
    blocks = re.findall(r"^» (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{page.name} stops at {blocks[-1:]}: {done.stdout[-1500:]}"


def test_what_is_not_run_is_counted() -> None:
    reasons = Counter(block.reason for block in all_blocks() if block.reason)
    for reason, count in reasons.most_common():
        sys.stdout.write(f"{count:4} blocks not run: {reason}\n")
