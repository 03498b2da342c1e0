"""``roundpipe init MODEL DATA``: a first config, each value with a comment that says why."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.forecast import planned_machine
from roundpipe.finetune.forecast.proposal import propose
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.parse import is_data, parse_argv
from roundpipe.finetune.settings.translate import KNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.forecast.proposal import Line, Proposal
    from roundpipe.plan.machine import Machine

USAGE = "roundpipe init MODEL DATA [key=value …] [-o FILE]"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WIDTH = 42  # columns of a setting before its comment


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command. Raises ConfigError, DataError; a file that is there is never replaced."""
    names, rest, file = _split(list(arguments))
    _, values = parse_argv(rest, known=KNOWN)
    given = _given(names, values)
    if file is not None and file.exists():
        raise ConfigError(f"there is a file already: {file}\nhint: -o ANOTHER.yaml")
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"cannot write: {file}: no such folder\nhint: -o ANOTHER.yaml")
    terminal = Terminal(sys.stderr)

    @functools.cache
    def machine() -> Machine:
        with terminal.waiting("looking at the machine"):
            return planned_machine(
                given.get("machine"), given.get("devices") or "auto", environment=environment
            )

    proposal = propose(given, machine, environment=environment, waiting=terminal.waiting)
    text = as_yaml(proposal, "my.yaml" if file is None else str(file))
    if file is None:
        typer.echo(text, nl=False)
        return 0
    try:
        write_text(file, text)
    except OSError as problem:
        reason = (problem.strerror or "error").lower()
        raise ConfigError(f"cannot write: {file}: {reason}\nhint: -o ANOTHER.yaml") from problem
    for what in proposal.unknown:
        typer.echo(f"not known here: {what}", err=True)
    if proposal.does_not_fit:
        typer.echo(f"does not fit this machine: {proposal.does_not_fit}", err=True)
    typer.echo(f"wrote {file}: roundpipe train {file}", err=True)
    return 0


def as_yaml(proposal: Proposal, file: str) -> str:
    """The config file: comments above, a setting a line with its comment behind."""
    lines = [
        f"# {proposal.title}",
        "#",
        f"#   roundpipe plan {file}     will it fit, how fast, how long",
        f"#   roundpipe train {file}",
        "#",
        "# Every other key has its default; `roundpipe schema` lists them.",
    ]
    for what in proposal.unknown:
        lines.append(f"# Not known here: {what}.")
    if proposal.does_not_fit:
        lines.append(f"# Does not fit this machine: {proposal.does_not_fit}.")
    for settings in proposal.groups.values():
        lines.append("")
        for line in settings:
            lines += _setting(line)
    return "\n".join(lines) + "\n"


def _setting(line: Line) -> list[str]:
    plain = line.value
    if isinstance(plain, float) and plain == int(plain):
        plain = int(plain)
    value = yaml.safe_dump(
        {line.key: plain}, sort_keys=False, allow_unicode=True, width=10**6
    ).rstrip("\n")
    if "\n" in value:
        return [f"# {line.why}", value]
    return [f"{value:<{_WIDTH}}  # {line.why}"]


def _split(words: list[str]) -> tuple[list[str], list[str], Path | None]:
    """Model and data, the settings, and the file that is to be written."""
    file: Path | None = None
    rest: list[str] = []
    names: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if name in ("-o", "--output"):
            if not equals:
                text = words.pop(0) if words else ""
            if not text:
                raise ConfigError(f"{name} names no file\nhint: {name} my.yaml")
            file = Path(text).expanduser()
        elif word.startswith("-"):
            rest.append(word)
            if not equals and words and not words[0].startswith("-"):
                rest.append(words.pop(0))
        elif equals and _KEY.fullmatch(name) and not Path(word).expanduser().exists():
            rest.append(word)
        else:
            names.append(word)
    return names, rest, file


def _given(names: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """The keys that were given, model and data among them."""
    given = {keys.ALIASES.get(key, key): value for key, value in values.items()}
    for key in ("model_name_or_path", "dataset"):
        if key not in given:
            if not names:
                what = "model" if key == "model_name_or_path" else "dataset"
                raise ConfigError(f"no {what} is given\nhint: {USAGE}")
            given[key] = names.pop(0)
    if is_data(str(given["model_name_or_path"])):
        raise ConfigError(f"data, not a model: {given['model_name_or_path']}\nhint: {USAGE}")
    if names:
        raise ConfigError(f"neither model nor data: {names[0]}\nhint: {USAGE}")
    return given
