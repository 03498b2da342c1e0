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
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe.errors import ConfigError, DeadlockError, PlanError, RoundPipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
_SIGNALLED = 128  # exit codes above this: the number of a signal is added to it
_TRAIN_USAGE = "roundpipe train [FILE] [key=value | --key value | --key=value …]"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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


@app.command(
    context_settings=_RAW,
    options_metavar="[FILE] [key=value …]",
    help="Fine-tune a model. FILE is a YAML config; any key of it may be given on the command line "
    "as key=value, --key value or --key=value. `roundpipe schema` lists the keys.",
    epilog="roundpipe train model=MODEL dataset=DATA.jsonl output_dir=out",
)
def train(context: typer.Context) -> None:
    """Fine-tune a model."""
    _guarded(lambda: _train(context.args))


@app.command(
    context_settings=_RAW,
    options_metavar="[FILE] [key=value …] [--why] [--json] [--trace FILE] [--html FILE]",
    help="Say if a job fits, how fast, how long. The job is what FILE and keys describe; nothing "
    "of it is loaded. machine=8x4090,512GB plans for a machine you do not have. Without a model: a "
    "table of what this machine can train. Exit code 3 where the job does not fit.",
    epilog="roundpipe plan model=Qwen/Qwen3-32B machine=8x4090,512GB method=lora batch_size=128",
)
def plan(context: typer.Context) -> None:
    """Say whether a job fits, how fast it is and how long it takes."""
    _guarded(lambda: _plan(context.args))


@app.command(
    context_settings=_RAW,
    options_metavar="MODEL DATA [key=value …] [-o FILE]",
    help="Write a first config for a model and a dataset, with values that fit this machine and "
    "this data, each with a comment that says why. To the terminal, or with -o to a new file.",
    epilog="roundpipe init Qwen/Qwen3-0.6B my.jsonl -o my.yaml",
)
def init(context: typer.Context) -> None:
    """Write a commented config."""
    _guarded(lambda: _init(context.args))


@app.command(
    context_settings=_RAW,
    options_metavar="RUN [prompt=…] [system=…] [temperature=…] [max_new_tokens=…] [--json]",
    help="Talk with a model, or have it answer prompts: those of prompt=… or, from a pipe, a line "
    "each. RUN is the folder of a run, a checkpoint in it, a model or an adapter: a folder, a hub "
    "id or a GGUF file. compare=base has the base answer beside its adapter. All keys of a config "
    "count: devices, dtype, device_memory_limit …",
    epilog="roundpipe chat out",
)
def chat(context: typer.Context) -> None:
    """Talk with a model."""
    _guarded(lambda: _chat(context.args))


@app.command(
    "eval",
    context_settings=_RAW,
    options_metavar="RUN [key=value …]",
    help="Score a model on data: loss and perplexity, and with answer_pattern (a regular "
    "expression with one group) how many of its answers match. RUN as for chat; without dataset=… "
    "the evaluation data of the run.",
    epilog="roundpipe eval out dataset=test.jsonl",
)
def evaluate(context: typer.Context) -> None:
    """Score a model on data."""
    _guarded(lambda: _eval(context.args))


@app.command(
    context_settings=_RAW,
    options_metavar="RUN [output_dir=FOLDER] [dtype=…] [base=dequantized|original]",
    help="Put an adapter into its base model: one model that everything loads. RUN as for chat. "
    "Written to FOLDER, or to merged in the run's folder. base=original merges an adapter trained "
    "over 4 bits into the weights of before.",
    epilog="roundpipe merge out output_dir=merged",
)
def merge(context: typer.Context) -> None:
    """Put an adapter into its base model."""
    _guarded(lambda: _merge(context.args))


app.command("export", context_settings=_RAW, hidden=True, help="The same as merge.")(merge)


@app.command(
    help="Print the keys of a config as JSON schema: type, default, meaning, other names. Editors "
    "check a config against it: # yaml-language-server: $schema=FILE"
)
def schema() -> None:
    """Print the JSON schema of a config."""
    _guarded(_print_schema)


@app.command(
    help="Show when each action of a run ran, as a trace or a page. The trace is for Perfetto, in "
    "RUN_DIR/trace.json where nothing else is said."
)
def trace(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run.")],
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the trace here.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page here.")] = None,
) -> None:
    """Turn the recorded timeline of a run into a trace or a page."""
    _guarded(lambda: _trace(run_dir, output, html))


@app.command(
    context_settings=_RAW,
    options_metavar="[devices=auto] [--output FILE] [--save] [--json]",
    help="Measure this machine: devices, links, host memory, optimizer. Says what is slow and what "
    "it costs, and writes a machine file: to FILE, or with --save where later plans find it.",
    epilog="roundpipe doctor devices=cpu*2 --output machine.yaml",
)
def doctor(context: typer.Context) -> None:
    """Measure this machine."""
    _guarded(lambda: _doctor(context.args))


app.command("env", context_settings=_RAW, hidden=True, help="The same as doctor.")(doctor)


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
