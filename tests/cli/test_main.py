from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import roundpipe
import roundpipe.finetune.run
from roundpipe.cli import main
from roundpipe.errors import (
    ConfigError,
    DataError,
    DeadlockError,
    DeviceError,
    PlanError,
    StepError,
)
from roundpipe.finetune.settings.config import TrainConfig
from roundpipe.finetune.use import chat_wish, eval_wish

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHED = ("WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "ROUNDPIPE_DEBUG")
BASE = ["train", "model=m", "dataset=d.jsonl"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Put a function in the place of the training loop."""

    def replace(train: Callable[..., object]) -> None:
        module = ModuleType("roundpipe.finetune.run.loop")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "roundpipe.finetune.run.loop", module)
        monkeypatch.setattr(roundpipe.finetune.run, "loop", module, raising=False)

    return replace


def raising(problem: BaseException) -> Callable[..., object]:
    def train(config: TrainConfig, notes: list[str], *, environment: Any, stop: Any) -> None:
        raise problem

    return train


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    return subprocess.run(
        [sys.executable, "-m", "roundpipe", *words],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# what answers at once


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from roundpipe.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'rich', 'numpy'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert time.perf_counter() - started < 3.0  # ten times what it may take


def test_version_and_schema_print_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"roundpipe {roundpipe.__version__}\n"
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(TrainConfig.model_fields) < set(schema["properties"])


def test_help_of_train_shows_how_keys_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "roundpipe train [FILE] [key=value" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "plan", "init", "chat", "eval", "merge", "doctor"])
def test_help_fits_a_terminal_and_its_usage_names_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Usage: roundpipe {command} ")
    assert max(map(len, lines)) < 80
    assert any(line.startswith("  For example: roundpipe ") for line in lines)


def test_help_names_every_option_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command, options in (
        ("chat", {*chat_wish.OPTIONS, *chat_wish.TEXTS} - {"batch_size"}),
        ("eval", set(eval_wish.OPTIONS)),
        ("trace", {"output", "html"}),
    ):
        main([command, "--help"])
        text = capsys.readouterr().out
        assert {name for name in options if name not in text} == set()


def test_the_list_of_commands_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "train" in capsys.readouterr().err


# what train is given


def test_train_hands_the_config_to_the_loop(loop: Any) -> None:
    seen: list[Any] = []
    loop(lambda config, notes, *, environment, stop: seen.append((config, notes)))
    assert main([*BASE, "--lr", "1e-4", "--batch-size=3", "deepspeed=z3.json"]) == 0
    [(config, notes)] = seen
    assert (config.learning_rate, config.batch_size) == (1e-4, 3)
    assert notes == ["not needed here: deepspeed"]


# exit codes, and errors as one paragraph


def test_a_bad_key_is_one_paragraph_with_the_way_out() -> None:
    done = run(*BASE, "learning_rat=1e-4")
    assert done.returncode == 2
    assert done.stderr == "unknown key: learning_rat\n  hint: learning_rate\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (ConfigError("no: 1\nhint: do this"), 2),
        (DataError("no: 1\nhint: do this"), 2),
        (DeviceError("no: 1\nhint: do this"), 2),
        (PlanError("no: 1\nhint: do this"), 3),
        (DeadlockError("no: 1\nhint: do this"), 1),
        (StepError("no: 1\nhint: do this"), 1),
    ],
)
def test_our_errors_are_one_paragraph(
    problem: Exception, code: int, loop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(raising(problem))
    assert main(BASE) == code
    assert capsys.readouterr().err == "no: 1\n  hint: do this\n"


def test_a_debugging_user_gets_the_traceback(
    loop: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEBUG", "1")
    loop(raising(ConfigError("no: 1")))
    assert main(BASE) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_we_did_not_foresee_shows_its_traceback(
    loop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(raising(ZeroDivisionError("by nought")))
    assert main(BASE) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: by nought" in shown
    assert "please report it" in shown


def test_nobody_reading_stdout_and_no_stdout_at_all_are_no_errors() -> None:
    command = [sys.executable, "-m", "roundpipe", "schema"]
    read, write = os.pipe()
    os.close(read)
    gone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (gone.returncode, gone.stderr) == (0, "")
    closed = ["sh", "-c", f"{shlex.join(command)} >&-"]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("word", ["schema", "--help"])
def test_a_full_disk_behind_stdout_is_said_in_a_line(word: str) -> None:
    command = [sys.executable, "-m", "roundpipe", word]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "cannot write to stdout: no space left on device\n"
        "  hint: make room, or send it elsewhere: > FILE\n"
    )


def test_ctrl_c_ends_with_130(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    loop(raising(KeyboardInterrupt()))
    assert main(BASE) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_train_without_anything_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "hint: roundpipe train [FILE]" in capsys.readouterr().err


# the launcher of habit


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"},
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_a_launcher_of_many_processes_is_refused_before_anything_else(
    environment: dict[str, str], loop: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loop(raising(AssertionError("trained")))
    assert main([*BASE, "learning_rat=1"]) == 2  # sooner than the bad key
    assert capsys.readouterr().err.startswith("started by torchrun, accelerate or the like: ")


def test_the_refusal_of_a_launcher_imports_no_torch() -> None:
    code = (
        "import sys; from roundpipe.cli import main; code = main(['train', 'a.yaml']); "
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    environment = {**os.environ, "WORLD_SIZE": "8"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"LOCAL_RANK": "-1"}],
)
def test_one_process_is_no_launcher(
    environment: dict[str, str], loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loop(lambda config, notes, *, environment, stop: None)
    assert main(BASE) == 0
