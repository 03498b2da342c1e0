"""A trainer's run that ends anywhere goes on to the same bits, the same records, the same best."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import tqdm
from tests.finetune.tiny_model import tiny_model, tiny_tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from roundpipe import RoundPipeTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [{"input_ids": [(5 * i + 3 * j) % 256 for j in range(6 + i % 5)]} for i in range(9)]


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of others start no thread that outlives them."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


class Ends(TrainerCallback):
    """Fails, or presses Ctrl-C, at an event after a step, once."""

    def __init__(self, event: str, step: int, *, fails: bool) -> None:
        self.step, self.fails, self.is_done = step, fails, False
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == self.step and not self.is_done:
            self.is_done = True
            if self.fails:
                raise ZeroDivisionError
            signal.raise_signal(signal.SIGINT)


class BreaksOff(TrainerCallback):
    """Has the first epoch end early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        control.should_epoch_stop = state.global_step == 2


CASES: dict[str, dict[str, Any]] = {
    "means of three steps": {"logging_steps": 3},
    "the best": {
        "learning_rate": 0.2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    },
    "patience": {
        "learning_rate": 0.5,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    },
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "an epoch that is broken off": {},
}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    """``runs(case, name, *callbacks)``: a trainer of its own folder."""
    made: list[RoundPipeTrainer] = []

    def make(case: str, name: str, *callbacks: Any) -> Any:
        usual = {
            "output_dir": str(tmp_path / name),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "num_train_epochs": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        own = {"patience": [EarlyStoppingCallback(2)], "an epoch that is broken off": [BreaksOff()]}
        made.append(
            RoundPipeTrainer(
                tiny_model().train(),
                TrainingArguments(**{**usual, **CASES[case]}),
                train_dataset=ROWS,
                eval_dataset=ROWS[:3],
                processing_class=tiny_tokenizer(),
                callbacks=[*own.get(case, ()), *callbacks],
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Outcomes that are known."""
    return {}


@pytest.fixture
def whole(runs: Any, found: dict[str, Any]) -> Any:
    """``whole(case)``: what a run that never ended came to."""

    def outcome(case: str) -> Any:
        if case not in found:
            trainer = runs(case, "whole")
            trainer.train()
            found[case] = outcome_of(trainer)
        return found[case]

    return outcome


def outcome_of(trainer: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Weights, records without times, and the step of the best."""
    records = [
        {name: value for name, value in each.items() if not name.endswith(("runtime", "_second"))}
        for each in trainer.state.log_history
    ]
    lines = (Path(trainer.args.output_dir) / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == trainer.state.log_history
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return weights, records, trainer.state.best_global_step


@pytest.mark.parametrize(
    ("case", "event", "step", "fails"),
    [
        ("means of three steps", "on_step_end", 4, False),
        ("means of three steps", "on_optimizer_step", 4, True),
        ("the best", "on_prediction_step", 2, False),
        ("the best", "on_evaluate", 2, True),
        ("the best", "on_step_end", 2, True),
        ("patience", "on_prediction_step", 2, False),
        ("epochs", "on_prediction_step", 3, False),
        ("epochs", "on_epoch_end", 3, True),
        ("an epoch that is broken off", "on_epoch_end", 2, True),
    ],
)
def test_what_a_run_owes_when_it_ends_is_done_when_it_goes_on(
    runs: Any, whole: Any, case: str, event: str, step: int, fails: bool
) -> None:
    name = f"{event} {step} {fails}"
    trainer = runs(case, name, Ends(event, step, fails=fails))
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        trainer.train()
    trainer.close()
    again = runs(case, name)  # another process, say
    again.train(resume_from_checkpoint=True)
    weights, records, best = outcome_of(again)
    expected, expected_records, expected_best = whole(case)
    assert records == expected_records
    assert best == expected_best
    for tensor, other in zip(weights.values(), expected.values(), strict=True):
        assert torch.equal(tensor, other)
