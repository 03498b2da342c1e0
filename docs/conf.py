"""Build the documentation as a site: ``make docs``, into build/docs.

The pages are also read on a code host, so links between them are plain relative ones. For the same
links to hold here, also those that leave docs/, the source folder is the repository's root and only
the pages below are taken from it. The lists of links in docs/index.md and docs/design/README.md are
the site's table of contents. Nothing is fetched: no inventories, no fonts.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.data import JsonLexer
from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
VERSION = re.search(
    r'^__version__ = "(.*)"', (ROOT / "src/roundpipe/__init__.py").read_text(), re.MULTILINE
)

project = "RoundPipe"
author = "the RoundPipe authors"
copyright = author
version = release = VERSION[1] if VERSION else ""

# Imported for the reference; says then what it would be without on a card.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
]
# Folders that are not even looked into.
exclude_patterns = [".*", "build", "dist", "out", "src", "tests", "scripts", "**/node_modules"]
language = "en"
INDICES = (root_doc, "docs/design/README")  # pages that list others
default_role = "py:obj"  # what docstrings mean by a single backtick: a name
nitpicky = False  # docstrings name types of torch, whose inventory would have to be fetched

myst_heading_anchors = 4  # the anchors that a code host makes of headings
myst_enable_extensions: list[str] = []
suppress_warnings = ["myst.header"]  # a page of the log may begin with dates

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
add_module_names = False

html_theme = "furo"
html_title = "RoundPipe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs/search_order.js")
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = "$ "  # what a console block prints is not copied
copybutton_only_copy_prompt_lines = True


def _link_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Let a link to a folder lead to its README, as it does on a code host."""
    place = ROOT / Path(page).parent

    def readme(match: re.Match[str]) -> str:
        lies = (place / match[1] / "README.md").is_file()
        return f"]({match[1]}README.md)" if lies else match[0]

    source[0] = re.sub(r"\]\(((?!https?:)[^)#]+/)\)", readme, source[0])


def _list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the site's order of pages from the lists of links in ``INDICES``, a group a heading."""
    if page not in INDICES:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE):
        pages = re.findall(r"^- \[([^]]*)\]\(([^)#:]+\.md)\)", section, re.MULTILINE)
        if pages:
            entries = [f"{title.replace('`', '')} <{place}>" for title, place in pages]
            options = ":hidden:\n" + (f":caption: {section.splitlines()[0]}\n" * (page == root_doc))
            source[0] += f"\n```{{toctree}}\n{options}\n" + "\n".join(entries) + "\n```\n"


def _write_front_door(app: Sphinx, failure: Exception | None) -> None:
    """Let the top of the site lead to its first page, which lies in docs/."""
    if failure is None and app.builder.format == "html":
        door = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
        link = '<title>RoundPipe</title><a href="docs/index.html">RoundPipe</a>\n'
        Path(app.outdir, "index.html").write_text(door + link, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook in what is ours."""
    app.add_lexer("jsonl", JsonLexer)
    app.add_lexer("csv", TextLexer)
    app.connect("source-read", _link_folders)
    app.connect("source-read", _list_pages)
    app.connect("build-finished", _write_front_door)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
