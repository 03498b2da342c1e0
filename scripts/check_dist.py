"""Try what is in a folder of built distributions as a stranger would: check_dist.py DIST

Installs the wheel, with its dependencies, in an environment made for it, and runs the README's
library example there. Nothing of the source tree is in reach.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def readme_example() -> str:
    """The first Python block of the README."""
    match = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    if match is None:
        sys.exit("README.md has no Python block")
    return match[1]


def check_contents(wheel: Path) -> None:
    """Every source file is in the wheel, with the type marker and the licence, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours = {name for name in names if ".dist-info/" not in name}
    if ours != wanted:
        sys.exit(f"wheel and source differ: {sorted(ours ^ wanted)}")
    if not any(name.endswith("LICENSE") for name in names):
        sys.exit("no LICENSE in the wheel")


def run(*command: str | Path, folder: Path) -> None:
    """Run one command in ``folder``; leave with its code where it fails."""
    done = subprocess.run([str(part) for part in command], cwd=folder, check=False)
    if done.returncode != 0:
        sys.exit(f"failed with {done.returncode}: {' '.join(map(str, command))[:200]}")


def main(dist: Path) -> None:
    """Check the one wheel in ``dist``; the sdist must be there beside it."""
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    check_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="roundpipe-dist-") as name:
        folder = Path(name)
        print(f"dist: installing {wheel.name} in an environment of its own (a minute or more)")
        venv.create(folder / "env", with_pip=True)
        binaries = folder / "env" / ("Scripts" if sys.platform == "win32" else "bin")
        python, constraints = binaries / "python", ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "-q", "-c", constraints, wheel.resolve(), folder=folder)
        print("dist: running the README's library example")
        (folder / "example.py").write_text(readme_example())
        run(python, "-I", "example.py", folder=folder)
        run(binaries / "roundpipe", "--version", folder=folder)
        run(python, "-m", "pip", "check", folder=folder)
    print(f"dist: {wheel.name} and {sdist.name} are good")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
