"""``roundpipe train`` as a user runs it: another process, files on disk, a terminal's signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    Python = Callable[..., subprocess.CompletedProcess[str]]

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a virtual machine may stand still for minutes
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

CONFIG = """
model: base                # a name people bring
dataset: data.jsonl
output_dir: out
devices: cpu*2
batch_size: 4
max_steps: 4
lr: 1e-2
lora_r: 4
val_size: 3
eval_steps: 2
sample_prompts: what is 1 + 1?
"""


def train(python: Python, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "roundpipe", "train", "my.yaml", *arguments, cwd=folder)


def in_python(output: str) -> str:
    """The lines of Python among what a run says in the end."""
    return output.partition("in Python:\n\n")[2].partition("\n\n")[0]


@pytest.fixture(scope="module")
def place(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and a config; what one test leaves the next finds."""
    folder = tmp_path_factory.mktemp("place")
    tiny.write_tiny_folder(folder / "base")
    tiny.write_tiny_data(folder / "data.jsonl")
    (folder / "my.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def first(python: Python, place: Path) -> subprocess.CompletedProcess[str]:
    """The first run, which every test below looks at."""
    return train(python, place)


def test_a_config_file_trains_an_adapter(first: Any, place: Path) -> None:
    assert first.returncode == 0, first.stderr
    log = (place / "out/trainer_log.jsonl").read_text()
    records = [json.loads(line) for line in log.splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    lines = first.stdout.splitlines()
    assert any(
        re.fullmatch(r"base · LoRA r=4 \(.* trained\) · 9 samples.* · 2 × cpu", x) for x in lines
    )
    assert sum(line.startswith("step ") for line in lines) == 6
    logged = (place / "out/run.log").read_text().splitlines()
    beside = [line for line in logged if line.startswith("answering the sample prompts, resident")]
    assert len(beside) == 2  # before and after: of no interest on a terminal
    assert [line for line in logged if line not in beside] == lines


def test_the_adapter_loads_with_stock_peft_and_changes_the_model(first: Any, place: Path) -> None:
    assert first.returncode == 0
    base = AutoModelForCausalLM.from_pretrained(place / "base").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = base(ids).logits
        model = PeftModel.from_pretrained(base, place / "out")
        answer = model.load_adapter(place / "out", "again")
        assert not answer.missing_keys
        assert not answer.unexpected_keys
        assert not torch.equal(model(ids).logits, before)


def test_the_lines_at_the_end_work_when_pasted(
    first: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = in_python(first.stdout)
    assert shown.startswith("from peft import PeftModel")
    monkeypatch.chdir(place)
    exec(compile(shown, "pasted", "exec"), {"__name__": "pasted"})
    after = next(x for x in first.stdout.splitlines() if x.startswith("  after:"))
    assert " ".join(capsys.readouterr().out.split()) == after.removeprefix("  after:").strip()


def test_the_same_command_again_says_so_and_ends_well(
    first: Any, python: Python, place: Path
) -> None:
    assert first.returncode == 0
    again = train(python, place)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("already finished: out ")


def test_a_changed_config_is_refused_with_each_difference(
    first: Any, python: Python, place: Path
) -> None:
    assert first.returncode == 0
    changed = train(python, place, "learning_rate=2e-2", "seed=1")
    assert changed.returncode == 2
    assert "learning_rate: 0.01 there, 0.02 now" in changed.stderr
    assert "seed: 42 there, 1 now" in changed.stderr
    assert "hint: output_dir=ANOTHER" in changed.stderr


def test_a_full_run_loads_with_stock_transformers(
    here: Python, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("output_dir=full", "method=full", "learning_rate=1e-3")
    done = here("train", "my.yaml", *changes, cwd=place)
    assert done.returncode == 0, done.stderr
    model, info = AutoModelForCausalLM.from_pretrained(place / "full", output_loading_info=True)
    assert not any(info.values()), info
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    shown = in_python(done.stdout)
    exec(compile(shown, "pasted", "exec"), {"__name__": "pasted"})
    assert capsys.readouterr().out


def test_a_broken_line_is_an_error_with_its_place(here: Python, place: Path) -> None:
    (place / "broken.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": \n')
    done = here("train", "my.yaml", "dataset=broken.jsonl", "output_dir=never", cwd=place)
    assert done.returncode == 2
    assert re.search(r"broken\.jsonl.*line 2", done.stderr)
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "never").exists()


def test_ctrl_c_saves_a_checkpoint_and_exits_130(environment: dict[str, str], place: Path) -> None:
    command = [sys.executable, "-m", "roundpipe", "train", "my.yaml", "output_dir=stopped"]
    with subprocess.Popen(
        [*command, "max_steps=100000", "eval_steps=100000"],
        cwd=place,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for line in running.stdout:
            if line.startswith("step 3/"):
                break
        running.send_signal(signal.SIGINT)
        rest, errors = running.stdout.read(), running.stderr.read()
        running.wait(60)
    assert running.returncode == 130, errors
    saved = re.search(r"^saved (stopped/checkpoint-\d+) · the same command goes on$", rest, re.M)
    assert saved is not None
    assert 0 < (place / "stopped/timeline.json").stat().st_size < 4e6
    assert "Traceback" not in errors
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    PeftModel.from_pretrained(base, place / saved[1])
