"""The blocks of a page of the documentation, and the page as a script that a reader would follow.

Rules, as CONTRIBUTING tells writers:

1. ``sh`` runs as printed, one shell for the whole page; ``# exit code N`` at the end of a line.
2. A block whose line above ends with a file's name in backticks and a colon, or whose first line is
   only a comment with a file's name, is written under that name.
3. ``python`` runs alone; ``<!-- after the blocks above -->`` over it: in the page's folder.
4. ``<!-- not run: REASON -->`` over a block: it is not run, and the text around it says why.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAPERS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
AFTER = "after the blocks above"
NOT_RUN = "not run: "
_FENCE = re.compile(r"^( *)```([\w{}.-]*)[^\n`]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (.*?) -->$")
_NAMED_ABOVE = re.compile(r"`([\w./-]+\.\w+)`:$")
_NAMED_INSIDE = re.compile(r"(?:#|//|--) ([\w./-]+\.\w+)$")
_EXIT_CODE = re.compile(r"\s+# exit code (\d+)$")
_FILES = ("csv", "json", "jsonl", "python", "text", "yaml", "jinja")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    path: Path
    line: int  # of its fence
    language: str
    text: str
    mark: str  # what the comment above it says, empty without one
    section: str  # the words from the heading above to the fence

    @property
    def name(self) -> str:
        inside = self.path.is_relative_to(ROOT)
        return f"{self.path.relative_to(ROOT) if inside else self.path.name}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        return self.mark.removeprefix(NOT_RUN) if self.mark.startswith(NOT_RUN) else ""

    @property
    def file(self) -> str:
        """The name it is to be written under, if any."""
        if self.language not in _FILES:
            return ""
        above = self.section.rstrip().splitlines()[-1:]
        inside = self.text.splitlines()[:1]
        found = [_NAMED_ABOVE.search(line.strip()) for line in above]
        found += [_NAMED_INSIDE.fullmatch(line.strip()) for line in inside]
        return next((match[1] for match in found if match), "")


def blocks_of(path: Path) -> list[Block]:
    """Every fenced block of one page, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        section = re.split(r"^#+ .*\n", before, flags=re.MULTILINE)[-1]
        lines = section.rstrip("\n").splitlines()
        mark = _MARK.search(lines[-1].strip()) if lines else None
        if mark is not None:
            section = "\n".join(lines[:-1])
        found.append(
            Block(
                path=path,
                line=before.count("\n") + 1,
                language=match[2],
                text=re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE),
                mark="" if mark is None else mark[1],
                section=section,
            )
        )
    return found


def all_blocks() -> list[Block]:
    """Every block of every page."""
    return [block for path in PAPERS for block in blocks_of(path)]


def guides() -> list[Path]:
    """The pages that have something to follow."""
    return [
        path
        for path in sorted((ROOT / "docs").glob("*.md"))
        if any(block.language == "sh" and not block.reason for block in blocks_of(path))
    ]


def as_script(path: Path, python: str) -> str:
    """Return what a reader of the page does, as one shell script."""
    lines = ["set -eo pipefail"]
    for place, block in enumerate(blocks_of(path)):
        if block.reason:
            continue
        if block.file:
            end = f"END_OF_BLOCK_{place}"
            folder = Path(block.file).parent
            lines += [f"mkdir -p {shlex.quote(str(folder))}", f"cat > {block.file} <<'{end}'"]
            lines += [block.text.rstrip("\n"), end]
        elif block.language == "python" and block.mark == AFTER:
            end = f"END_OF_BLOCK_{place}"
            lines += [f"echo '» {block.name}'", f"{shlex.quote(python)} - <<'{end}'"]
            lines += [block.text.rstrip("\n"), end]
        elif block.language == "sh":
            lines += [f"echo '» {block.name}'", *map(_command, block.text.splitlines())]
    return "\n".join(lines) + "\n"


def _command(line: str) -> str:
    """One line of a shell block; a code that it is meant to end with is checked."""
    wanted = _EXIT_CODE.search(line)
    if wanted is None:
        return line
    return f'{line[: wanted.start()]} || code=$?; test "${{code:-0}}" = {wanted[1]}; unset code'
