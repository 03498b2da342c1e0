"""``roundpipe plan``: will it fit, how fast, how long; and what a machine can train at all."""

from __future__ import annotations

import difflib
import functools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.forecast import forecast, planned_machine
from roundpipe.finetune.forecast.wish import read_wish
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.account import account_lines
from roundpipe.finetune.settings.parse import parse_argv, read_file
from roundpipe.finetune.settings.translate import KNOWN
from roundpipe.report.forecast_text import forecast_lines, table_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.forecast.forecast import Found
    from roundpipe.plan.machine import Machine

_OPTIONS = ("why", "json", "trace", "html")
_TABLE_KEYS = {"machine", "devices"}
_DOES_NOT_FIT = 3


@dataclass(frozen=True)
class Wanted:
    """What of a plan is to be shown, and which files are to be written."""

    why: bool = False
    as_json: bool = False
    trace: Path | None = None
    html: Path | None = None

    @property
    def is_played(self) -> bool:
        """Whether steps must be played action by action."""
        return self.why or self.trace is not None or self.html is not None


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command; the exit code is 3 where the job does not fit. Raises ConfigError."""
    file, values = parse_argv(arguments, known=KNOWN.union(_OPTIONS))
    wanted = _wanted(values)
    in_file = read_file(file, environment) if file is not None else {}
    if file is None and values.keys() <= _TABLE_KEYS:
        return _table(values, wanted, environment)
    terminal = Terminal(sys.stderr)

    @functools.cache
    def machine() -> Machine:
        both = {keys.ALIASES.get(key, key): each for key, each in {**in_file, **values}.items()}
        with terminal.waiting("looking at the machine"):
            return planned_machine(
                both.get("machine"),
                both.get("devices") or "auto",
                environment=environment,
                folder=Path(str(both.get("output_dir") or "out")),
            )

    wish = read_wish(in_file, values, lambda devices: machine().num_devices)
    if not wish.has_model:
        raise ConfigError(
            "no model_name_or_path is given\nhint: model=Qwen/Qwen3-8B, a folder or a config.json"
        )
    table = account_lines(wish.keys) if file is not None else []
    if table:
        wish = replace(wish, notes=wish.beyond)
    found = forecast(wish, machine(), environment=environment, waiting=terminal.waiting)
    if wanted.is_played and found.speed is not None:
        with terminal.waiting("playing some steps"):
            found = _played(found, wanted)
    if wanted.as_json:
        became = {each.key: each.text for each in wish.keys}
        typer.echo(json.dumps({**found.forecast.as_values(), "keys": became}, indent=2))
    else:
        head = [f"what became of the keys of {file}", *table, ""] if table else []
        show([*head, *forecast_lines(found.forecast, why=wanted.why)])
    return 0 if found.forecast.fits else _DOES_NOT_FIT


def _played(found: Found, wanted: Wanted) -> Found:
    from roundpipe.finetune.forecast.timeline import played, write_files  # noqa: PLC0415

    steps = played(found)
    write_files(
        steps, trace=wanted.trace, html=wanted.html, say=lambda text: typer.echo(text, err=True)
    )
    return steps.found


def _table(values: Mapping[str, Any], wanted: Wanted, environment: Mapping[str, str]) -> int:
    from roundpipe.finetune.forecast.table import model_table  # noqa: PLC0415

    for name in ("trace", "html", "why"):
        if getattr(wanted, name):
            raise ConfigError(f"--{name} is of one job\nhint: model=NAME beside it")
    machine = planned_machine(
        values.get("machine"), values.get("devices") or "auto", environment=environment
    )
    table = model_table(machine)
    if wanted.as_json:
        typer.echo(json.dumps(table.as_values(), indent=2))
    else:
        show(table_lines(table))
    return 0


def _wanted(values: dict[str, Any]) -> Wanted:
    """Take the options out of the keys."""
    taken = {name: values.pop(name) for name in _OPTIONS if name in values}
    for key in values.keys() - KNOWN:
        for near in difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.75):
            raise ConfigError(f"unknown key: {key}\nhint: --{near}")
    for name in ("why", "json"):
        if not isinstance(taken.get(name, False), bool):
            raise ConfigError(f"neither true nor false: {name}={taken[name]}\nhint: --{name}")
    files: dict[str, Path | None] = {}
    for name in ("trace", "html"):
        given = taken.get(name)
        if given is not None and (isinstance(given, bool) or not str(given)):
            raise ConfigError(
                f"{name} names no file\nhint: --{name} plan.{'json' if name == 'trace' else 'html'}"
            )
        files[name] = None if given is None else Path(str(given)).expanduser()
    return Wanted(why=taken.get("why", False), as_json=taken.get("json", False), **files)


def show(lines: Sequence[str]) -> None:
    """Print lines: plain where they are piped, with a little colour on a terminal."""
    if not sys.stdout.isatty():
        typer.echo("\n".join(lines))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"^  (gpu|cpu|host|disk) .*?\b(?P<green>ok)\b")
        text.highlight_regex(r" no(?=  )", "bold red")
        text.highlight_regex(r" ok(?=  )", "green")
        text.highlight_regex(r"^does not fit.*", "bold red")
        text.highlight_regex(r"^  hint:", "bold")
        text.highlight_regex(r"^·.*", "dim")
        text.highlight_regex(r"^  [a-z ]{1,15}(?= )", "dim")
        console.print(text)
