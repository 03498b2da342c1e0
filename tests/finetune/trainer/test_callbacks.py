"""What a callback is told of a run, beside what transformers' own Trainer tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tqdm
from datasets import Dataset
from tests.finetune.tiny_model import tiny_model, tiny_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from roundpipe import RoundPipeTrainer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of transformers' own start no thread that outlives them."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def _noting(event: str) -> Any:
    def note(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        del args
        self.seen.append((event, state.global_step, round(state.epoch or 0, 6)))
        self.kwargs.setdefault(event, set(kwargs))
        act = self.acts.get((event, state.global_step))
        if act is not None:
            act(control)
            return control
        return None

    return note


class Noting(TrainerCallback):
    """Notes every event; ``acts``: what to do with the control at an event after a step."""

    def __init__(self, acts: dict[tuple[str, int], Any] | None = None) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.kwargs: dict[str, set[str]] = {}
        self.acts = acts or {}


for _event in EVENTS:
    setattr(Noting, _event, _noting(_event))


def rows(count: int, *, tag: int = 0) -> Dataset:
    """Tokenised rows of different lengths."""
    made = []
    for i in range(count):
        ids = [(7 * i + 3 * j + tag) % 256 for j in range(5 + (5 * i) % 9)]
        labels = [-100, -100, *ids[2:]]
        made.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)})
    return Dataset.from_list(made)


def told(
    kind: Any, folder: Path, callbacks: list[Any], evals: Any = None, **arguments: Any
) -> tuple[Noting, Any]:
    """What a callback of eleven rows' training is told, and the trainer."""
    usual = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**usual, **arguments})
    tokenizer = tiny_tokenizer()
    more = {}
    if kind is Trainer:
        more["data_collator"] = DataCollatorForSeq2Seq(tokenizer)
    noting = next(each for each in callbacks if isinstance(each, Noting))
    trainer = kind(
        model=tiny_model().train(),
        args=args,
        train_dataset=rows(11),
        eval_dataset=evals,
        processing_class=tokenizer,
        callbacks=callbacks,
        **more,
    )
    trainer.train()
    if kind is RoundPipeTrainer:
        trainer.close()
    return noting, trainer


def stops(control: Any) -> None:
    control.should_training_stop = True


def ends_epoch(control: Any) -> None:
    control.should_epoch_stop = True


def saves(control: Any) -> None:
    control.should_save = True


def evaluates(control: Any) -> None:
    control.should_evaluate = True


def logs(control: Any) -> None:
    control.should_log = True


BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
CASES: dict[str, dict[str, Any]] = {
    "an epoch and a half, nothing else": {
        "num_train_epochs": 1.5,
        "save_strategy": "no",
        "logging_strategy": "no",
    },
    "accumulation that leaves a rest, all by epochs": {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 4,
        "evals": rows(7, tag=1),
        **BY_EPOCH,
    },
    "steps, two evaluations, one before the first step": {
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "logging_first_step": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_on_start": True,
        "per_device_eval_batch_size": 2,
        "save_steps": 2,
        "evals": {"a": rows(7, tag=1), "b": rows(3, tag=2)},
    },
    "the best is loaded, and patience ends": {
        "num_train_epochs": 3,
        "learning_rate": 0.3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_total_limit": 1,
        "logging_steps": 0.25,
        "load_best_model_at_end": True,
        "evals": rows(6, tag=1),
        "stops_early": True,
    },
    "a callback stops an epoch, then training": {
        "num_train_epochs": 3,
        "logging_steps": 1,
        "gradient_accumulation_steps": 2,
        "acts": {("on_step_end", 1): ends_epoch, ("on_epoch_begin", 1): None}
        | {("on_step_end", 3): stops},
    },
    "a callback breaks off between microbatches": {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "acts": {("on_substep_end", 1): ends_epoch},
    },
    "a callback asks for everything": {
        "max_steps": 4,
        "logging_strategy": "no",
        "save_strategy": "no",
        "evals": rows(3, tag=1),
        "acts": {
            ("on_step_end", 1): saves,
            ("on_step_end", 2): evaluates,
            ("on_step_end", 3): logs,
        },
    },
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_callback_sees_what_it_would_see_from_transformers_trainer(
    tmp_path: Path, case: str
) -> None:
    given = dict(CASES[case])
    acts = {key: act for key, act in given.pop("acts", {}).items() if act}
    early = given.pop("stops_early", False)

    def callbacks() -> list[Any]:
        return [Noting(acts), *([EarlyStoppingCallback(1)] if early else [])]

    theirs, reference = told(Trainer, tmp_path / "theirs", callbacks(), **given)
    ours, trainer = told(RoundPipeTrainer, tmp_path / "ours", callbacks(), **given)
    assert ours.seen == theirs.seen
    for event, names in theirs.kwargs.items():
        assert names <= ours.kwargs[event], event
    _same_state(trainer.state, reference.state)
    # Ours keeps the newest beside the best, to go on from, where transformers drops it at the end.
    assert _saved(tmp_path / "ours") >= _saved(tmp_path / "theirs")


def _saved(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def _same_state(ours: Any, theirs: Any) -> None:
    for name in ("global_step", "max_steps", "num_train_epochs", "epoch", "best_global_step"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("logging_steps", "save_steps", "eval_steps", "train_batch_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for mine, other in zip(ours.log_history, theirs.log_history, strict=True):
        assert mine.keys() - {"num_tokens", "tokens_per_second"} == other.keys()


def test_losses_norms_and_rates_are_those_of_transformers_trainer(tmp_path: Path) -> None:
    arguments = {"num_train_epochs": 2, "logging_steps": 1, "gradient_accumulation_steps": 2}
    _, theirs = told(Trainer, tmp_path / "theirs", [Noting()], weight_decay=0.1, **arguments)
    _, ours = told(RoundPipeTrainer, tmp_path / "ours", [Noting()], weight_decay=0.1, **arguments)
    for mine, other in zip(ours.state.log_history[:-1], theirs.state.log_history, strict=False):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert mine["learning_rate"] == pytest.approx(other["learning_rate"], rel=1e-12)


def test_a_callback_that_looks_at_gradients_finds_them(tmp_path: Path) -> None:
    class Norms(Noting):
        norms: list[float] = []  # noqa: RUF012 - one run

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            self.norms.append(sum(float(g.square().sum()) for g in grads) ** 0.5)

    noting, trainer = told(RoundPipeTrainer, tmp_path, [Norms()], max_steps=3, logging_steps=1)
    logged = [record["grad_norm"] for record in trainer.state.log_history[:-1]]
    assert noting.norms == pytest.approx(logged, rel=1e-4)  # type: ignore[attr-defined]


def test_a_callback_on_save_finds_the_whole_checkpoint(tmp_path: Path) -> None:
    class Looks(Noting):
        found: list[bool] = []  # noqa: RUF012 - one run

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            folder = tmp_path / f"checkpoint-{state.global_step}"
            assert args.output_dir == str(tmp_path)
            self.found.append((folder / "model.safetensors").is_file())

    noting, _ = told(RoundPipeTrainer, tmp_path, [Looks()], max_steps=4, save_steps=2)
    assert noting.found == [True, True]  # type: ignore[attr-defined]
