"""``roundpipe eval``: its words, what it prints, its files and its exit codes."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.finetune.tiny_model import write_tiny_data, write_tiny_folder

from roundpipe.cli import main
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.settings.config import make_config

if TYPE_CHECKING:
    from roundpipe.finetune.run.signals import Stop

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ASKS = "answer_pattern=is ([0-9]+)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a run of one step in ``out``."""
    folder = tmp_path_factory.mktemp("place")
    write_tiny_folder(folder / "model")
    write_tiny_data(folder / "data.jsonl")
    config = make_config(
        {
            "model": str(folder / "model"),
            "dataset": str(folder / "data.jsonl"),
            "val_size": 5,
            "eval_steps": 1,
            "max_steps": 1,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "warmup_steps": 0,
            "devices": "cpu",
            "output_dir": str(folder / "out"),
        }
    )[0]
    train(config, terminal=Terminal(io.StringIO()))
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["eval", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_run_is_scored_on_its_own_evaluation_data(capsys: Any, place: Path) -> None:
    code, out, err = evaluate(capsys, "out")
    assert code == 0
    log = (place / "out" / "trainer_log.jsonl").read_text().splitlines()
    loss = [r["eval_loss"] for r in map(json.loads, log) if "eval_loss" in r][-1]
    assert out.startswith(f"out: loss {loss:.4f} · perplexity ")
    assert out.count("\n") == 1
    assert "5 samples, " in err
    assert "val_size=5" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_answers_that_a_full_disk_does_not_take_are_kept_elsewhere(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, out, err = evaluate(capsys, "out", ASKS, "max_new_tokens=3", "output=/dev/full")
    (kept,) = tmp_path.glob("answers-*.jsonl")
    assert code == 2
    assert out.startswith("out: loss ")
    assert f"no space left on device\n  hint: the answers are in {kept}\n" in err
    assert [set(json.loads(line)) for line in kept.read_text().splitlines()]


def test_answers_go_to_a_file_and_json_is_all_that_is_printed(capsys: Any, place: Path) -> None:
    code, out, _ = evaluate(
        capsys, "out", "--json", ASKS, "max_new_tokens=3", "output=new/a.jsonl", "compare=base"
    )
    assert code == 0
    base, after = json.loads(out)["scores"]
    assert (base["name"], after["name"]) == ("model", "out")
    assert after["answers"]["answered"] == after["answers"]["asked"] == 5
    assert base["loss"] != after["loss"]
    rows = [json.loads(line) for line in (place / "new" / "a.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == ["model"] * 5 + ["out"] * 5
    assert set(rows[0]) == {
        "model",
        "prompt",
        "reference",
        "answer",
        "wanted",
        "found",
        "matched",
    }
    assert rows[0]["prompt"].endswith("<|im_start|>assistant\n")
    assert rows[0]["wanted"] in rows[0]["reference"]


@pytest.mark.parametrize("word", ["dataset=data.jsonl", "--eval-dataset=data.jsonl"])
def test_other_data_than_the_runs_may_be_named_either_way(capsys: Any, word: str) -> None:
    code, out, err = evaluate(capsys, "out", word, "--max_samples", "7", ASKS, "max_new_tokens=2")
    assert code == 0
    assert "7 samples · " in out
    assert "data.jsonl" in err
    assert "  answers: 0 of 7 match: 0.0 % (with 95 % confidence 0.0 to 35.4 %)" in out


def test_a_bare_model_is_scored_on_what_is_named(capsys: Any) -> None:
    code, out, _ = evaluate(capsys, "model", "dataset=data.jsonl", "batch_size=5", "devices=cpu*2")
    assert code == 0
    assert out.startswith("model: loss ")
    assert "12 samples · " in out


def test_samples_whose_own_answer_the_pattern_does_not_find_are_said(capsys: Any) -> None:
    _, out, err = evaluate(
        capsys, "out", "dataset=data.jsonl", "answer_pattern=is (1[0-9])", "max_new_tokens=2"
    )
    assert "7 of 12 samples are not asked: their own answer has nothing" in err
    assert "0 of 5 match" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["out", "answer_pattern=is [0-9]+"], "needs one group, and has none"),
        (["out", "answer_pattern=[Ii]s ([a-z]+)"], "matches no answer of"),
        (["out", "--answer-pattern"], "nothing follows --answer-pattern"),
        (["out", "answer_pattern=(4", "dataset=data.jsonl"], "is no regular expression: (4"),
        (["out", "output=a.jsonl"], "output is of answers, and none are asked for"),
        (["out", "max_samples=0"], "no whole number from 1 on: max_samples=0"),
        (["out", "compare=other"], "compare with what: compare=other"),
        (["out", "--json=7"], "neither true nor false: json=7"),
        (["out", ASKS, "output"], "two of RUN"),
        (["out", ASKS, "--output"], "output names no file"),
        (["out", ASKS, "train_on_prompt=true"], "told from questions: train_on_prompt=true"),
        (["out", "answer_patern=(4)"], "unknown key: answer_patern"),
        (["out", ASKS, "output=data.jsonl/a"], "output: cannot be written: data.jsonl/a: "),
        (["out", ASKS, "temperature=0.7"], "greedy where they are counted: temperature"),
        (["out", ASKS, "output=model"], "output: a folder: model"),
        (["model"], "no data to score on"),
        (["model", "dataset=data.jsonl", "compare=base"], "compare=base: no adapter"),
        (["model", "dataset=none.jsonl"], "none.jsonl"),
        (["./nothing"], "nothing is called like that"),
        ([], "no RUN is given"),
        (["out", ASKS, "dataset=text.txt"], "text.txt is of running text"),
    ],
)
def test_what_cannot_be_done_is_said_with_a_way_out(
    capsys: Any, place: Path, words: list[str], said: str
) -> None:
    (place / "text.txt").write_text("once upon a time\n")
    code, out, err = evaluate(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "\n  hint: " in err


def test_what_was_reached_when_a_signal_came_is_shown(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    from roundpipe.finetune.use import evaluating

    batches = evaluating.batches_of

    def interrupted(*args: Any) -> Any:
        for number, batch in enumerate(batches(*args)):
            if number == 1:
                stops[0].handle(2)
            yield batch

    stops: list[Stop] = []
    made = evaluating.evaluate_subject

    def noted(*args: Any, stop: Stop, **more: Any) -> Any:
        stops.append(stop)
        return made(*args, stop=stop, **more)

    monkeypatch.setattr(evaluating, "batches_of", interrupted)
    monkeypatch.setattr(evaluating, "evaluate_subject", noted)
    code, out, _ = evaluate(
        capsys, "out", "dataset=data.jsonl", "batch_size=3", ASKS, "output=b.jsonl"
    )
    assert code == 130
    assert "3 samples so far" in out
    assert "answers" not in out
    assert (place / "b.jsonl").read_text() == ""
