"""A run that cannot be lost: real processes, real signals, a terminal that goes away, kill -9.

Each interrupted run is given again with the same command and must end in the bits of a run that
nobody disturbed.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.finetune import tiny_model

pytestmark = [
    pytest.mark.accept,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("stopped_run.py")
CODES = {"INT": 130, "TERM": 143, "HUP": 129}
CONFIG = """
model: base
dataset: data.jsonl
devices: cpu*2
batch_size: 4
num_train_epochs: 2
lr: 1e-2
lora_r: 4
lora_dropout: 0.1
val_size: 2
eval_steps: 4
save_steps: 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tiny_model.write_tiny_folder(folder / "base")
    tiny_model.write_tiny_data(folder / "data.jsonl", count=14)
    (folder / "my.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="module")
def train(place: Path, environment: dict[str, str]) -> Any:
    def run(out: str, *before: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(before or ("-m", "roundpipe"))]
        return subprocess.run(
            [*command, "train", "my.yaml", f"output_dir={out}"],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def undisturbed(place: Path, train: Any) -> bytes:
    """The weights of a run that nobody disturbed."""
    done = train("whole")
    assert done.returncode == 0, done.stderr
    return (place / "whole" / "adapter_model.safetensors").read_bytes()


def require_same_end(place: Path, train: Any, out: str, weights: bytes, *first: str) -> None:
    again = train(out)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(first)
    assert (place / out / "adapter_model.safetensors").read_bytes() == weights
    log = (place / out / "trainer_log.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, log) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("phase", ["import", "tokenizer", "data", "load"])
def test_before_the_first_step_it_leaves_at_once(
    place: Path, train: Any, undisturbed: bytes, phase: str, name: str
) -> None:
    out = f"{phase}-{name}"
    done = train(out, str(DRIVER), phase, name)
    assert done.returncode == CODES[name], done.stderr
    assert done.stderr == "interrupted\n"
    assert not (place / out).exists()
    if name == "INT":
        require_same_end(place, train, out, undisturbed, "read as ours")


@pytest.mark.parametrize(
    "words", [["plan", "model=base"], ["init", "base", "data.jsonl"], ["chat", "base", "prompt=so"]]
)
def test_ctrl_c_is_not_lost_in_an_import(
    place: Path, environment: dict[str, str], words: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), "lost", "INT", *words, "devices=cpu"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.parametrize(
    ("phase", "name", "at"), [("step", "INT", 3), ("evaluation", "HUP", 4), ("save", "TERM", 2)]
)
def test_while_steps_run_it_saves_and_the_same_command_goes_on(
    place: Path, train: Any, undisturbed: bytes, phase: str, name: str, at: int
) -> None:
    out = f"{phase}-{name}"
    done = train(out, str(DRIVER), phase, name)
    assert done.returncode == CODES[name], done.stderr
    assert done.stderr == ""
    last = done.stdout.splitlines()[-1]
    saved = next(n for n in range(at, 7) if f"saved {out}/checkpoint-{n} · the same" in last)
    assert saved == at or phase == "save"  # beside which steps go on
    first = f"going on from {out}/checkpoint-{saved} (step {saved} of 6)\n"
    require_same_end(place, train, out, undisturbed, first)


def test_a_signal_while_the_result_is_written_lets_it_be_finished(
    place: Path, train: Any, undisturbed: bytes
) -> None:
    done = train("result", str(DRIVER), "result", "TERM")
    assert done.returncode == 143, done.stderr
    assert (place / "result" / "adapter_model.safetensors").read_bytes() == undisturbed
    assert train("result").stdout.startswith("already finished")


def test_a_second_signal_leaves_at_once_and_nothing_is_lost(
    place: Path, train: Any, undisturbed: bytes
) -> None:
    done = train("twice", str(DRIVER), "step", "INT,INT")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    first = ("going on from twice/checkpoint-2", "starting over")
    require_same_end(place, train, "twice", undisturbed, *first)


@pytest.mark.parametrize("phase", ["step", "evaluation", "save", "result"])
def test_killed_it_goes_on_from_the_last_checkpoint(
    place: Path, train: Any, undisturbed: bytes, phase: str
) -> None:
    out = f"killed-{phase}"
    done = train(out, str(DRIVER), phase, "KILL")
    assert done.returncode == -signal.SIGKILL
    going_on = f"going on from {out}/checkpoint-"
    # A checkpoint is written beside the steps: the first may not have been whole yet.
    first = (going_on,) if phase == "result" else (going_on, "starting over")
    require_same_end(place, train, out, undisturbed, *first)


def started(place: Path, environment: dict[str, str], out: str, **how: Any) -> Any:
    command = [sys.executable, "-m", "roundpipe", "train", "my.yaml", f"output_dir={out}"]
    return subprocess.Popen(
        [*command, "num_train_epochs=100000", "eval_strategy=no"],
        cwd=place,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        **how,
    )


def read_until_steps_run(descriptor: int) -> None:
    """Read what is shown until a step is; a bar is drawn anew a few times a second only."""
    text = ""
    while not re.search(r"step [1-9]\d*/", text):
        text += os.read(descriptor, 4096).decode(errors="replace")


def test_a_terminal_that_is_closed_leaves_a_checkpoint(
    place: Path, environment: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    run = started(
        place, environment, "closed", stdin=theirs, stdout=theirs, stderr=theirs, process_group=0
    )
    os.close(theirs)
    read_until_steps_run(ours)
    os.close(ours)  # whoever writes now gets an error
    run.send_signal(signal.SIGHUP)  # what the system sends the terminal's own group
    assert run.wait(60) == 129
    assert list((place / "closed").glob("checkpoint-*/manifest.json"))
    assert "saved closed/checkpoint-" in (place / "closed" / "run.log").read_text()


def test_a_terminal_that_is_gone_does_not_end_what_nohup_began(
    place: Path, environment: dict[str, str]
) -> None:
    ours, theirs = os.pipe()

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run = started(place, environment, "nohup", stdout=theirs, stderr=theirs, preexec_fn=ignore)
    os.close(theirs)
    read_until_steps_run(ours)
    os.close(ours)
    run.send_signal(signal.SIGHUP)
    log = place / "nohup" / "run.log"
    before = log.stat().st_size
    while log.stat().st_size < before + 2000:
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143


# ---- a model of 135 million weights


@pytest.mark.parametrize("staleness", [0, 1])
def test_smollm2_stopped_at_every_step_of_two_epochs(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.loop import train
    from roundpipe.finetune.run.signals import Stopped
    from roundpipe.finetune.run.step_log import TIMES
    from roundpipe.finetune.run.training import Training
    from roundpipe.finetune.settings.config import make_config

    smollm2.skip_if_absent()

    def config(out: str) -> Any:
        given = {
            "model_name_or_path": f"package:{smollm2.PACKAGE}/{smollm2.FILE}",
            "dataset": {"path": str(smollm2.DATA), "max_samples": 10},
            "output_dir": str(tmp_path / out),
            "devices": "cpu*2",
            "batch_size": 4,  # 4 + 4 + 2
            "num_train_epochs": 2,
            "max_length": 256,  # no sample loses its answer
            "lora_dropout": 0.1,
            "staleness": staleness,
        }
        return make_config(given)[0]

    def run(out: str) -> None:
        train(config(out), terminal=Terminal(io.StringIO()))

    run("whole")
    make_step = Training.make_step
    for stop in range(1, 6):

        def stopping(self: Training, step: int, at: int = stop) -> None:
            make_step(self, step)
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Training, "make_step", stopping)
            with pytest.raises(Stopped):
                run("parts")
    run("parts")
    for name in ("adapter_model.safetensors", "checkpoint-6/adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    moments = sorted((tmp_path / "whole" / "checkpoint-6").glob("optimizer-*"))
    for path in moments:
        other = tmp_path / "parts" / "checkpoint-6" / path.name
        assert path.read_bytes() == other.read_bytes()
    logs = [
        [
            {key: value for key, value in json.loads(line).items() if key not in TIMES}
            for line in (tmp_path / out / "trainer_log.jsonl").read_text().splitlines()
        ]
        for out in ("whole", "parts")
    ]
    assert logs[0] == logs[1]
