from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from tests.finetune.plain_loop import plain_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.collate import collate
from roundpipe.finetune.data.dataset import load_dataset
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run import prepare
from roundpipe.finetune.run.batches import Rows
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.run.retry import Splitting
from roundpipe.finetune.run.training import Training
from roundpipe.report.timeline_record import read_record

if TYPE_CHECKING:
    from roundpipe.finetune.settings.config import TrainConfig

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

FULL = {"finetuning_type": "full", "learning_rate": 1e-3}
PACKED = {"packing": True, "max_length": 200, "batch_size": 2}  # 12 samples in 5 rows, say


def run(config: TrainConfig) -> tuple[Any, list[str]]:
    """The result, and the lines that were shown."""
    stream = io.StringIO()
    result = train(config, ["a note"], terminal=Terminal(stream))
    return result, stream.getvalue().splitlines()


@pytest.mark.parametrize(
    "changes", [{}, FULL, {"micro_batch_size": 1, "weight_decay": 0.1}, PACKED]
)
@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_a_run_equals_a_plain_loop(config_of: Any, changes: dict[str, Any], devices: str) -> None:
    config = config_of(devices=devices, max_steps=6, **changes)  # 12 samples: 5 + 5 + 2, twice
    result, _ = run(config)
    plain, model = plain_run(config)
    assert [r["step"] for r in result.history] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(result.history, plain, strict=True):
        # the sums over microbatches run in another order
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["learning_rate"] == pytest.approx(theirs["lr"], rel=1e-12)
    saved = load_result(config)
    ids = torch.arange(30).reshape(2, 15)
    with torch.no_grad():
        difference = (saved(ids).logits - model.eval()(ids).logits).abs().max()
    assert difference < 1e-3


def load_result(config: TrainConfig, folder: str = "") -> Any:
    """What was written, through stock transformers and peft."""
    path = Path(config.output_dir, folder)
    if config.finetuning_type == "full":
        return AutoModelForCausalLM.from_pretrained(path).eval()
    base = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
    return PeftModel.from_pretrained(base, path).eval()


def test_the_loss_falls_and_is_on_record(config_of: Any) -> None:
    result, lines = run(config_of(max_steps=8, batch_size=12, val_size=3, eval_steps=4))
    losses = [r["loss"] for r in result.history if "loss" in r]
    evaluations = [(r["step"], r["eval_loss"]) for r in result.history if "eval_loss" in r]
    assert losses[-1] < losses[0]
    assert [step for step, _ in evaluations] == [4, 8]
    assert evaluations[1][1] < evaluations[0][1]
    log = Path(result.folder, "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in log] == result.history
    assert sum(line.startswith("step ") for line in lines) == 10
    assert Path(result.folder, "training_loss.png").stat().st_size > 1000


def test_the_evaluation_loss_is_that_of_the_weights_at_that_step(config_of: Any) -> None:
    config = config_of(val_size=4, eval_steps=3)
    result, _ = run(config)
    model = load_result(config)
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    held_out = load_dataset(config, tokenizer).eval_samples
    with torch.no_grad():
        expected = model(**collate(held_out, tokenizer.pad_token_id)).loss.item()
    assert result.history[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)


def _without_waiting(lines: list[str]) -> list[str]:
    """Lines but for those of what took long, which a busy machine shows one more of."""
    return [line for line in lines if not line.startswith("answering") and line[-1:] != "…"]


def test_the_folder_holds_all_that_is_promised(config_of: Any) -> None:
    result, lines = run(config_of(sample_prompts=["what is 1 + 1?"]))
    assert {path.name for path in result.folder.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "checkpoint-3",
        "config.yaml",
        "generation_config.json",
        "run.log",
        "timeline.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_log.jsonl",
        "trainer_state.json",
        "training_loss.png",
    }
    logged = (result.folder / "run.log").read_text().splitlines()
    assert _without_waiting(logged) == _without_waiting(lines)
    assert lines[0] == "a note"
    assert any(line.startswith("sample: <|im_start|>user") for line in lines)
    assert any(line.startswith("  before:") for line in lines)
    assert any(line.startswith("  after:") for line in lines)
    record = read_record(result.folder / "timeline.json")
    assert [step.step for step in record.timeline.steps] == [1, 2, 3]
    assert {"0.compute", "0.weights", "host"} <= {s.stream for s in record.timeline.spans}
    assert len(record.counters["0.memory"]) == 3


def test_the_same_command_again_leaves_a_finished_run_alone(config_of: Any) -> None:
    result, _ = run(config_of())
    before = {path.name: path.stat().st_mtime_ns for path in result.folder.iterdir()}
    again, lines = run(config_of(devices="cpu*2"))
    assert again is None
    assert len(lines) == 1
    assert lines[0].startswith("already finished: ")
    assert {path.name: path.stat().st_mtime_ns for path in result.folder.iterdir()} == before


def test_a_changed_config_is_refused_before_anything_is_loaded(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = run(config_of())
    monkeypatch.setattr(prepare, "prepare", None)
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.01 there, 0\.1 now"):
        run(config_of(learning_rate=0.1))
    assert result.folder.exists()


def test_a_broken_line_is_told_with_its_place_and_leaves_no_folder(
    config_of: Any, tmp_path: Path
) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n{"question": "a", "ans\n')
    with pytest.raises(DataError, match=r"(?s)broken\.jsonl.*line 2"):
        run(config_of(dataset=str(data)))
    assert not Path(config_of().output_dir).exists()


def test_two_runs_of_one_config_are_the_same_bits(config_of: Any, tmp_path: Path) -> None:
    first, _ = run(config_of(lora_dropout=0.2))
    second, _ = run(config_of(lora_dropout=0.2, output_dir=str(tmp_path / "other")))
    weights = [(r.folder / "adapter_model.safetensors").read_bytes() for r in (first, second)]
    assert weights[0] == weights[1]
    losses = [[r["loss"] for r in result.history] for result in (first, second)]
    assert losses[0] == losses[1]


def test_the_callers_folder_and_logs_are_not_touched(config_of: Any) -> None:
    before = os.listdir()
    run(config_of())
    assert os.listdir() == before


@pytest.mark.parametrize(
    ("changes", "samples", "expected"),
    [
        ({}, 5, None),
        ({"num_microbatch": 3}, 2, 3),
        ({"micro_batch_size": 2}, 5, 3),
        ({"micro_batch_size": 2}, 4, 2),
        ({"micro_batch_size": 8}, 1, 1),
    ],
)
def test_a_short_batch_keeps_the_size_of_its_microbatches(
    config_of: Any, changes: dict[str, Any], samples: int, expected: int | None
) -> None:
    config = config_of(**changes)
    training: Any = SimpleNamespace(
        job=SimpleNamespace(config=config, batches=Rows(0)),
        splitting=Splitting(config.num_microbatch),
    )
    assert Training._run_config(training, samples).num_microbatch == expected


@pytest.mark.parametrize("staleness", [0, 1])
def test_it_trains_at_either_staleness(config_of: Any, staleness: int) -> None:
    result, _ = run(config_of(staleness=staleness, max_steps=6, batch_size=12))
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < losses[0]
