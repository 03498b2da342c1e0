"""Checkpoints of whole runs: when, which stay, and what a disk that fails comes to."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from roundpipe import durable
from roundpipe.errors import PlanError, RoundPipeError, StepError
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run import prepare, result, room, steps
from roundpipe.finetune.run.evaluate import Evaluation
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.run.saving import Saver
from roundpipe.finetune.run.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.finetune.settings.config import TrainConfig

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(autouse=True)
def _only_what_matters_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs neither count their model beforehand nor draw their losses, which takes most time."""
    monkeypatch.setattr(prepare, "_check_counted", lambda *_: None)
    monkeypatch.setattr(result, "draw_losses", lambda *_, **__: None)


def run(config: TrainConfig) -> list[str]:
    stream = io.StringIO()
    try:
        train(config, terminal=Terminal(stream))
    finally:
        lines[:] = stream.getvalue().splitlines()
    return list(lines)


lines: list[str] = []  # of the last run, also where it failed


def checkpoints(config: TrainConfig) -> list[str]:
    return sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*"))


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something while a step is made, before it is given."""

    def arrange(step: int, act: Callable[[], None]) -> None:
        make = Training.make_step

        def acting(self: Training, at: int) -> None:
            if at == step:
                act()
            make(self, at)

        monkeypatch.setattr(Training, "make_step", acting)

    return arrange


@pytest.fixture
def eval_losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Let evaluations come to these losses."""

    def arrange(losses: list[float]) -> None:
        coming: Iterator[float] = iter(losses)

        def evaluation(self: Training, should_stop: Any) -> Evaluation:
            return Evaluation(next(coming), 10)

        monkeypatch.setattr(Training, "_evaluation", evaluation)

    return arrange


def test_a_file_asks_for_a_checkpoint_and_goes(config_of: Any, during: Any) -> None:
    config = config_of()
    during(2, Path(config.output_dir, "save-now").touch)
    run(config)
    assert f"saved {config.output_dir}/checkpoint-2" in lines
    assert checkpoints(config) == ["checkpoint-2", "checkpoint-3"]
    assert not Path(config.output_dir, "save-now").exists()


def test_the_oldest_go_but_never_the_best_which_is_the_result(
    config_of: Any, eval_losses: Any
) -> None:
    eval_losses([2.0, 1.0, 3.0, 4.0, 3.0])
    config = config_of(
        max_steps=5,
        save_steps=1,
        save_total_limit=1,
        val_size=2,
        eval_steps=1,
        load_best_model_at_end=True,
    )
    run(config)
    assert checkpoints(config) == ["checkpoint-2", "checkpoint-5"]
    assert "the result is the best: step 2, evaluation loss 1" in lines
    name = "adapter_model.safetensors"
    final, best, last = (
        load_file(Path(config.output_dir, place, name))
        for place in ("", "checkpoint-2", "checkpoint-5")
    )
    assert all(final[key].equal(best[key]) for key in best)
    assert not all(final[key].equal(last[key]) for key in last)
    state = json.loads(Path(config.output_dir, "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"], state["global_step"]) == (1.0, 2, 5)


def test_the_best_stays_until_a_better_one_is_on_the_disk(
    config_of: Any, eval_losses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint between the two may be done only when the better evaluation is known."""
    eval_losses([2.0, 1.0, 3.0, 0.5])
    config = config_of(
        max_steps=4,
        save_steps=1,
        save_total_limit=1,
        val_size=2,
        eval_steps=1,
        load_best_model_at_end=True,
    )
    no_space_for("checkpoint-4", monkeypatch)
    monkeypatch.setattr(Saver, "_collect", collect_when_asked(Saver._collect))
    run(config)
    assert checkpoints(config) == ["checkpoint-2", "checkpoint-3"]


def collect_when_asked(collect: Any) -> Any:
    """Take note of a save only where it is waited for, as of one that takes long."""

    def late(self: Saver, *, wait: bool = False) -> None:
        if wait:
            collect(self, wait=True)

    return late


def test_the_best_may_lie_beside_the_checkpoint_that_was_named(
    config_of: Any, eval_losses: Any, tmp_path: Path
) -> None:
    best = {"save_steps": 1, "val_size": 2, "eval_steps": 1, "load_best_model_at_end": True}
    eval_losses([1.0, 2.0, 3.0, 4.0, 5.0])
    run(config_of(**best))
    named = f"{config_of().output_dir}/checkpoint-2"
    other = config_of(
        **best, max_steps=4, resume_from_checkpoint=named, output_dir=str(tmp_path / "other")
    )
    run(other)
    assert "the result is the best: step 1, evaluation loss 1" in lines
    name = "adapter_model.safetensors"
    final = Path(other.output_dir, name).read_bytes()
    assert final == Path(named).with_name("checkpoint-1").joinpath(name).read_bytes()


def test_it_stops_early_where_nothing_gets_better(config_of: Any, eval_losses: Any) -> None:
    eval_losses([2.0, 3.0, 4.0])
    config = config_of(
        max_steps=9,
        val_size=2,
        eval_steps=1,
        early_stopping_patience=2,
        save_strategy="best",
        logging_steps=2,
    )
    run(config)
    assert checkpoints(config) == ["checkpoint-1"]
    assert any(line.startswith("stopped early after step 3") for line in lines)
    state = json.loads(Path(config.output_dir, "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (3, 9)
    assert [r["step"] for r in state["log_history"] if "loss" in r] == [2, 3]
    assert run(config)[0].startswith("already finished")


def test_a_checkpoint_loads_like_a_result(config_of: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config_of(save_only_model=True, save_steps=2)
    run(config)
    folder = Path(config.output_dir, "checkpoint-2")
    base = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
    PeftModel.from_pretrained(base, folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    state = json.loads((folder / "trainer_state.json").read_text())
    assert [record["step"] for record in state["log_history"]] == [1, 2]
    assert not list(folder.glob("optimizer-*"))


# ---- what fails


def no_space_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full whenever a file of this checkpoint is written."""
    open_file = durable.HashedFile.__init__

    def failing(self: durable.HashedFile, path: Path) -> None:
        if name in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        open_file(self, path)

    monkeypatch.setattr(durable.HashedFile, "__init__", failing)


def test_a_save_that_fails_is_told_loudly_and_the_run_goes_on(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(max_steps=6, save_steps=2)
    no_space_for("checkpoint-4", monkeypatch)
    run(config)
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert f"{config.output_dir}/checkpoint-4 could not be saved" in warning
    assert "o space left" in warning
    assert f"the newest is {config.output_dir}/checkpoint-2; training goes on" in warning
    assert checkpoints(config) == ["checkpoint-2", "checkpoint-6"]
    assert not [path for path in Path(config.output_dir).iterdir() if ".saving" in path.name]


def test_a_result_that_cannot_be_saved_is_an_error_and_nothing_is_lost(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(result, "save_result", full)
        with pytest.raises(RoundPipeError, match=r"(?s)the result could not be saved: No space.*h"):
            run(config_of())
    out = config_of().output_dir
    assert f"saved {out}/checkpoint-3 · the same command goes on" in lines
    assert run(config_of())[0] == f"going on from {out}/checkpoint-3 (step 3 of 3)"
    assert not any(line.startswith("step ") for line in lines)
    assert Path(out, "adapter_model.safetensors").exists()


def test_a_library_that_refuses_to_write_beside_a_checkpoint_does_not_end_the_run(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any) -> None:
        raise ValueError("a strange tokenizer")

    monkeypatch.setattr("roundpipe.finetune.run.saving._write_beside", refusing)
    run(config_of(save_steps=1))
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 3
    assert "checkpoint-1 could not be saved: a strange tokenizer (there is none yet" in warnings[0]
    assert Path(config_of().output_dir, "adapter_model.safetensors").exists()


def test_the_best_weights_are_never_saved_as_those_of_the_last_step(
    config_of: Any, eval_losses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(result, "save_result", full)
    eval_losses([1.0, 2.0, 3.0])
    config = config_of(val_size=2, eval_steps=1, load_best_model_at_end=True, save_strategy="best")
    with pytest.raises(RoundPipeError, match="the result could not be saved"):
        run(config)
    assert lines[-1] == f"saved {config.output_dir}/checkpoint-1 · the same command goes on"
    assert checkpoints(config) == ["checkpoint-1"]


def test_weights_that_are_mixed_never_become_the_result(
    config_of: Any, eval_losses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_read(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("roundpipe.checkpointing.put_back_weights", half_read)
    eval_losses([1.0, 2.0, 3.0])
    config = config_of(val_size=2, eval_steps=1, load_best_model_at_end=True, save_steps=1)
    with pytest.raises(RoundPipeError, match="so the weights are mixed"):
        run(config)
    assert not Path(config.output_dir, "adapter_model.safetensors").exists()
    assert "a checkpoint could not be saved" not in lines[-1]


def test_a_step_that_fails_leaves_a_checkpoint_of_the_one_before(
    config_of: Any, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make = Training.make_step

        def failing(self: Training, step: int) -> None:
            if step == 3:
                raise StepError("a card fell off\nhint: push it back")
            make(self, step)

        patch.setattr(Training, "make_step", failing)
        with pytest.raises(StepError, match="a card fell off"):
            run(config_of())
    out = config_of().output_dir
    assert lines[-2:] == [
        "failed after step 2: a card fell off",
        f"saved {out}/checkpoint-2 · the same command goes on",
    ]
    run(config_of())
    whole = config_of(output_dir=str(tmp_path / "whole"))
    run(whole)
    final = [Path(c, "adapter_model.safetensors").read_bytes() for c in (out, whole.output_dir)]
    assert final[0] == final[1]


def test_there_must_be_room_before_the_first_step(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 2_200_000

    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: Disk)
    monkeypatch.setattr(steps, "train_job", None)
    full = {"finetuning_type": "full"}
    with pytest.raises(PlanError) as caught:
        run(config_of(**full))
    text = str(caught.value)
    assert "does not fit on the disk of output_dir: " in text
    assert "2 + 1 checkpoints of " in text
    assert "hint: save_total_limit=1 (" in text
    assert not Path(config_of().output_dir).exists()


def test_the_room_is_what_checkpoints_take(config_of: Any) -> None:
    config = config_of(finetuning_type="full", dtype="bf16", max_steps=1, learning_rate=1e-3)
    found: list[room.Room] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "roundpipe.finetune.run.prepare.require_room", lambda of, *_: found.append(of)
        )
        run(config)
    folder = Path(config.output_dir, "checkpoint-1")
    files = [*folder.glob("*.safetensors"), folder / "tokenizer.json"]
    size = sum(path.stat().st_size for path in files)
    assert found[0].checkpoint == pytest.approx(size, rel=0.15)  # headers of tiny files
