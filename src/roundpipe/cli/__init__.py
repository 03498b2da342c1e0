"""The command line: thin commands, exit codes, and errors as one paragraph.

Nothing heavy is imported here: ``roundpipe --help`` answers before torch could be found. A command
imports what it needs when it runs, after it has refused what can be refused without.

Exit codes: 0 done · 2 bad config, data or environment · 3 will not fit · 129, 130, 143 a terminal
that hung up, Ctrl-C, SIGTERM · 1 anything else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from roundpipe.cli import explained
from roundpipe.errors import ConfigError, DeadlockError, PlanError, RoundPipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIGNALLED = 128  # exit codes above this: the number of a signal is added to it
_TRAIN_USAGE = "roundpipe train [FILE] [key=value | --key value | --key=value …]"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune models larger than your devices.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _have_streams()
    code: object = 0
    try:
        app(args=arguments, prog_name="roundpipe")
    except SystemExit as end:
        code = end.code
    except OSError as problem:  # of what typer itself writes
        code = _unwritten(problem)
        if code is None:
            raise
    _forget_broken_pipes()
    number = code if isinstance(code, int) else int(code is not None)
    if argv is None and number > _SIGNALLED:
        os._exit(number)  # at once: libraries' threads may be at something that takes minutes
    return number


def _have_streams() -> None:
    """Have something to write to where a stream was closed before Python began (``>&-``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (stays)


def _forget_broken_pipes() -> None:
    """Write what is left to write; Python would end with an error of its own at a reader gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Show a line on stderr, if anybody is there to read it."""
    with contextlib.suppress(OSError, ValueError):
        typer.echo(text, err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from roundpipe import __version__  # noqa: PLC0415

        typer.echo(f"roundpipe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(**explained.TRAIN.as_settings())
def train(context: typer.Context) -> None:
    """Fine-tune a model."""
    _guarded(lambda: _train(context.args))


@app.command(**explained.PLAN.as_settings())
def plan(context: typer.Context) -> None:
    """Say whether a job fits, how fast it is and how long it takes."""
    _guarded(lambda: _heard(_plan, context.args))


@app.command(**explained.INIT.as_settings())
def init(context: typer.Context) -> None:
    """Write a commented config."""
    _guarded(lambda: _heard(_init, context.args))


@app.command(**explained.CHAT.as_settings())
def chat(context: typer.Context) -> None:
    """Talk with a model."""
    _guarded(lambda: _chat(context.args))


@app.command("eval", **explained.EVAL.as_settings())
def evaluate(context: typer.Context) -> None:
    """Score a model on data."""
    _guarded(lambda: _eval(context.args))


@app.command(**explained.MERGE.as_settings())
def merge(context: typer.Context) -> None:
    """Put an adapter into its base model."""
    _guarded(lambda: _merge(context.args))


app.command("export", **explained.MERGE.as_settings(), hidden=True)(merge)


@app.command(
    options_metavar="[> FILE]",
    short_help="Print all keys of a config, as JSON schema.",
    help="Print all keys of a config as JSON schema: type, default, meaning, other names. Editors "
    "check a config whose first line is: # yaml-language-server: $schema=FILE",
    epilog="For example: roundpipe schema > roundpipe.schema.json",
)
def schema() -> None:
    """Print the JSON schema of a config."""
    _guarded(_print_schema)


class _Worded(TyperCommand):
    """A command whose usage is ``options_metavar`` alone."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # typer's own: {RUN} for an argument
        return [self.options_metavar or ""]


@app.command(
    cls=_Worded,
    options_metavar="RUN [--output FILE] [--html FILE]",
    short_help="Show when each action of a run ran, as a trace or a page.",
    help="Show when each action of a run ran. RUN is the output_dir of a run. Without an option a "
    "trace for Perfetto is written to trace.json in it.",
    epilog="For example: roundpipe trace out --html run.html",
)
def trace(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", hidden=True)],
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the trace here.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page here.")] = None,
) -> None:
    """Turn the recorded timeline of a run into a trace or a page."""
    _guarded(lambda: _trace(run_dir, output, html))


@app.command(**explained.DOCTOR.as_settings())
def doctor(context: typer.Context) -> None:
    """Measure this machine."""
    _guarded(lambda: _heard(_doctor, context.args))


app.command("env", **explained.DOCTOR.as_settings(), hidden=True)(doctor)


def _train(arguments: list[str]) -> int:
    _refuse_launchers()
    if not arguments:
        raise ConfigError(f"no config: nothing to train\nhint: {_TRAIN_USAGE}")
    from roundpipe.finetune.run.signals import leave_at_once, listening  # noqa: PLC0415

    with listening(leave_at_once) as stop:
        from roundpipe.finetune.settings.config import load_config  # noqa: PLC0415, pydantic

        config, notes = load_config(arguments, environment=os.environ)
        from roundpipe.finetune.run import loop  # noqa: PLC0415, pydantic

        loop.train(config, notes, environment=os.environ, stop=stop)
    return 0


def _plan(arguments: list[str]) -> int:
    from roundpipe.cli.plan import run  # noqa: PLC0415, pydantic

    return run(arguments, environment=os.environ)


def _chat(arguments: list[str]) -> int:
    _refuse_launchers()
    from roundpipe.cli.chat import run  # noqa: PLC0415, pydantic

    return run(arguments, environment=os.environ)


def _eval(arguments: list[str]) -> int:
    _refuse_launchers()
    from roundpipe.cli.eval import run  # noqa: PLC0415, pydantic

    return run(arguments, environment=os.environ)


def _merge(arguments: list[str]) -> int:
    _refuse_launchers()
    from roundpipe.cli.merge import run  # noqa: PLC0415, pydantic

    return run(arguments, environment=os.environ)


def _init(arguments: list[str]) -> int:
    from roundpipe.cli.init import run  # noqa: PLC0415, pydantic

    return run(arguments, environment=os.environ)


def _trace(run_dir: str, output: str | None, html: str | None) -> int:
    from roundpipe.cli.trace import trace as write_trace  # noqa: PLC0415, pydantic

    return write_trace(run_dir, output=output, html=html)


def _doctor(arguments: list[str]) -> int:
    from roundpipe.cli.doctor import run  # noqa: PLC0415, torch

    return run(arguments, environment=os.environ)


def _print_schema() -> int:
    import json  # noqa: PLC0415

    from roundpipe.finetune.settings.schema import json_schema  # noqa: PLC0415, pydantic

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def _heard(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run what a signal ends wherever it is, also where a library would lose the exception."""
    from roundpipe.finetune.run.signals import leave_at_once, listening  # noqa: PLC0415

    with listening(leave_at_once):
        return command(arguments)


def _refuse_launchers() -> None:
    """One process drives every device: eight of them would each take eight GPUs."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ConfigError(_launched(f"{name}={size}"))
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdecimal() and os.environ.get("WORLD_SIZE") != "1":
        raise ConfigError(_launched(f"LOCAL_RANK={rank}"))


def _launched(sign: str) -> str:
    return (
        f"started by torchrun, accelerate or the like: {sign}; one process drives all devices"
        "\nhint: start it without the launcher: roundpipe train …"
    )


def _guarded(command: Callable[[], int]) -> None:
    """Run a command's body and leave with its exit code, problems said on stderr."""
    try:
        code = command()
    except RoundPipeError as problem:
        if os.environ.get("ROUNDPIPE_DEBUG"):
            _say(traceback.format_exc())
        _say(str(problem).replace("\nhint:", "\n  hint:"))
        code = _code(problem)
    except KeyboardInterrupt as end:
        if not getattr(end, "is_told", False):
            _say("interrupted")
        code = getattr(end, "exit_code", 130)
    except Exception as problem:  # the last frame of the program
        unwritten = _unwritten(problem)
        if unwritten is not None:
            raise typer.Exit(unwritten) from None
        _say(traceback.format_exc())
        _say("this is not your mistake: please report it with the lines above")
        code = 1
    raise typer.Exit(code)


def _unwritten(problem: Exception) -> int | None:
    """The exit code where a command ended because stdout takes no more; None: it was not that."""
    if not isinstance(problem, OSError):
        return None
    try:
        sys.stdout.write("\n")  # does it take anything?
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has enough
        return 0
    except OSError as error:
        _say(f"cannot write to stdout: {(error.strerror or str(error)).lower()}")
        _say("  hint: make room, or send it elsewhere: > FILE")
        return 1
    return None


def _code(problem: RoundPipeError) -> int:
    if isinstance(problem, ConfigError):
        return 2
    return 3 if isinstance(problem, PlanError) and not isinstance(problem, DeadlockError) else 1
