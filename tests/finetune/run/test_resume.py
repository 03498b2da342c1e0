"""A run that is stopped and gone on with is the run that was never stopped, to the bit."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.run_folder import claim
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run import prepare, result
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.run.signals import Stopped
from roundpipe.finetune.run.step_log import TIMES
from roundpipe.finetune.run.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.finetune.output.earlier import Earlier
    from roundpipe.finetune.settings.config import TrainConfig

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

STEPS = 4  # of 10 samples, 6 a step: two epochs, and the last step of each is short


@pytest.fixture(autouse=True)
def _only_what_matters_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs neither count their model beforehand nor draw their losses, which takes most time."""
    monkeypatch.setattr(prepare, "_check_counted", lambda *_: None)
    monkeypatch.setattr(result, "draw_losses", lambda *_, **__: None)


@pytest.fixture
def stop_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Send this process a signal while a step, or an evaluation after it, is under way."""

    def arrange(step: int | None, *, what: str = "make_step") -> None:
        original = getattr(Training, what)
        signalled: list[int] = []

        def stopping(self: Training, *arguments: Any) -> Any:
            at = arguments[0] if what == "make_step" else self.done
            if at == step and not signalled:
                signalled.append(at)
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments)

        monkeypatch.setattr(Training, what, stopping)

    return arrange


def run(config: TrainConfig) -> list[str]:
    """The lines of a run to its end."""
    stream = io.StringIO()
    train(config, terminal=Terminal(stream))
    return stream.getvalue().splitlines()


def stopped(config: TrainConfig) -> list[str]:
    """The lines of a run that a signal ends."""
    stream = io.StringIO()
    with pytest.raises(Stopped) as caught:
        train(config, terminal=Terminal(stream))
    assert caught.value.exit_code == 143
    return stream.getvalue().splitlines()


def bits(config: TrainConfig) -> dict[str, Any]:
    """All that must be equal: weights, moments, the state beside them, what was logged."""
    folder = Path(config.output_dir)
    files = [*folder.glob("*.safetensors"), *folder.glob(f"checkpoint-{STEPS}/*.safetensors")]
    content: dict[str, Any] = {str(f.relative_to(folder)): f.read_bytes() for f in files}
    log = (folder / "trainer_log.jsonl").read_text().splitlines()
    content["log"] = [without_times(json.loads(line)) for line in log]
    state = json.loads((folder / "trainer_state.json").read_text())
    assert [without_times(record) for record in state["log_history"]] == content["log"]
    return content


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMES}


CASES = {
    "exact": {"lora_dropout": 0.2, "num_microbatch": 2, "neftune_noise_alpha": 5},
    "stale and packed": {
        "staleness": 1,
        "finetuning_type": "full",
        "learning_rate": 1e-3,
        "packing": True,
        "max_length": 128,
        "batch_size": 3,
        "logging_steps": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_at_every_step_it_ends_in_the_same_bits(
    config_of: Any, tmp_path: Path, stop_in: Any, case: str
) -> None:
    changes = {"num_train_epochs": 2, "max_steps": None, "batch_size": 6}
    changes |= {"val_size": 2, "eval_steps": 3, **CASES[case]}
    whole = config_of(**changes, output_dir=str(tmp_path / "whole"))
    run(whole)
    parts = config_of(**changes)
    out = parts.output_dir
    for step in range(1, STEPS):
        stop_in(step)
        lines = stopped(parts)
        if step > 1:
            before = f"{out}/checkpoint-{step - 1} (step {step - 1} of {STEPS})"
            assert lines[0] == f"going on from {before}"
        assert lines[-1] == f"saved {out}/checkpoint-{step} · the same command goes on"
    run(parts)
    assert bits(parts) == bits(whole)


# ---- what the same command does about a run that was stopped


@pytest.fixture(scope="module")
def _half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half") / "out"


@pytest.fixture
def half(_half: Path, config_of: Any, stop_in: Any) -> Callable[..., TrainConfig]:
    """A config whose run of six steps was stopped in the fourth; keywords change the config."""
    if not _half.exists():
        stop_in(4)
        stopped(config_of(output_dir=str(_half), max_steps=6, save_steps=2, val_size=2))
    shutil.copytree(_half, config_of().output_dir)

    def make(**changes: Any) -> TrainConfig:
        config: TrainConfig = config_of(
            **{"max_steps": 6, "save_steps": 2, "val_size": 2, **changes}
        )
        return config

    return make


def checkpoints(config: TrainConfig) -> list[str]:
    return sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*"))


def spoil(path: Path) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_taken(half: Any) -> None:
    config = half()
    spoil(Path(config.output_dir, "checkpoint-4", "optimizer-00000.safetensors"))
    lines = run(config)
    assert lines[0] == f"going on from {config.output_dir}/checkpoint-2 (step 2 of 6)"
    assert lines[1].startswith(f"{config.output_dir}/checkpoint-4 is left out: ")
    assert "optimizer-00000.safetensors" in lines[1]
    log = Path(config.output_dir, "trainer_log.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, log) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert checkpoints(config) == ["checkpoint-4", "checkpoint-6"]


def found(config: TrainConfig) -> Earlier:
    with claim(config) as folder:
        return folder.earlier


def test_checkpoints_that_are_not_whole_are_never_trained_over_unasked(half: Any) -> None:
    config = half()
    for path in Path(config.output_dir).glob("checkpoint-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(ConfigError) as caught:
        found(config)
    text, _, hint = str(caught.value).partition("\nhint: ")
    first, *others = text.splitlines()
    assert first.endswith("holds an unfinished run without a checkpoint to go on from:")
    assert [line.partition(" is left out: ")[0][-12:] for line in others] == [
        "checkpoint-4",
        "checkpoint-2",
    ]
    assert "overwrite_output_dir=true" in hint
    with claim(half(resume_from_checkpoint="none")) as folder:
        folder.start(config)
    assert checkpoints(config) == []


def test_what_changed_is_listed_with_the_ways_out(half: Any) -> None:
    config = half(learning_rate=0.5, resume_from_checkpoint=None)
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert "learning_rate: 0.01 there, 0.5 now" in str(caught.value)
    hint = str(caught.value).partition("hint: ")[2]
    for way_out in ("output_dir=", "overwrite_output_dir=true", "resume_from_checkpoint=auto"):
        assert way_out in hint
    assert checkpoints(config) == ["checkpoint-2", "checkpoint-4"]


def test_auto_goes_on_with_what_is_new(half: Any) -> None:
    config = half(
        learning_rate=0.5, lr_scheduler_type="constant", resume_from_checkpoint="auto", val_size=3
    )
    lines = run(config)
    assert lines[0].startswith(f"going on from {config.output_dir}/checkpoint-4 ")
    assert lines[1].startswith("with another config: ")
    assert "dataset: the samples are others than when the run began" in lines
    log = Path(config.output_dir, "trainer_log.jsonl").read_text().splitlines()
    rates = [record["learning_rate"] for record in map(json.loads, log) if "loss" in record]
    assert rates[3] < 0.01
    assert rates[4:] == [0.5, 0.5]
    assert run(half(learning_rate=0.5, lr_scheduler_type="constant", val_size=3))[0].startswith(
        "already finished"
    )


def test_a_finished_run_goes_on_for_more_steps(half: Any) -> None:
    run(half())
    with pytest.raises(ConfigError, match="max_steps: 6 there, 8 now"):
        run(half(max_steps=8))
    lines = run(half(max_steps=8, resume_from_checkpoint="auto"))
    assert lines[0].startswith(f"going on from {half().output_dir}/checkpoint-6 (step 6 of 6)")
    log = Path(half().output_dir, "trainer_log.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, log) if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert records[6]["learning_rate"] > 0  # of eight steps, not the end of six


def test_a_named_checkpoint_begins_another_branch(half: Any) -> None:
    named = f"{half().output_dir}/checkpoint-2"
    config = half(resume_from_checkpoint=named, seed=7)
    earlier = found(config)
    assert earlier.lines == (
        f"going on from {named} (step 2 of 6)",
        "with another config: seed: 42 there, 7 now",
    )
    with claim(config) as folder:
        folder.start(config)
    assert checkpoints(config) == ["checkpoint-2"]
    with pytest.raises(ConfigError, match=r"no such checkpoint: .*nowhere"):
        half(resume_from_checkpoint="nowhere")
    spoil(Path(named, "state.json"))
    with pytest.raises(ConfigError, match=r"cannot be gone on from: .*state\.json"):
        found(config)


def test_a_branch_from_another_folder_has_checkpoints_of_its_own(
    half: Any, tmp_path: Path, stop_in: Any
) -> None:
    named = f"{half().output_dir}/checkpoint-4"
    config = half(output_dir=str(tmp_path / "branch"), resume_from_checkpoint=named)
    stop_in(4, what="begin")  # before its first step
    lines = stopped(config)
    assert lines[-1].startswith(f"saved {config.output_dir}/checkpoint-4 · ")
    assert checkpoints(config) == ["checkpoint-4"]


def test_none_starts_over_as_asked(half: Any) -> None:
    earlier = found(half(resume_from_checkpoint="none"))
    assert (earlier.checkpoint, earlier.lines) == (None, ("starting over, as asked",))
    with pytest.raises(ConfigError, match="seed: 42 there, 7 now"):
        found(half(resume_from_checkpoint="none", seed=7))


def test_on_another_machine_places_and_devices_may_differ(
    half: Any, tmp_path: Path, tiny_folder: Path, tiny_data: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "elsewhere")
    shutil.copyfile(tiny_data, tmp_path / "copy.jsonl")
    moved = half(
        model_name_or_path=str(tmp_path / "elsewhere"),
        dataset=str(tmp_path / "copy.jsonl"),
        devices="cpu*3",
        save_steps=3,
    )
    assert run(moved)[0].startswith("going on from ")


def test_other_data_or_another_base_is_refused_before_anything_changes(
    half: Any, tmp_path: Path, tiny: Any, tiny_folder: Path
) -> None:
    tiny.write_tiny_data(tmp_path / "other.jsonl", count=13)
    with pytest.raises(ConfigError, match=r"(?s)dataset: the samples are others.*hint: .*auto"):
        run(half(dataset=str(tmp_path / "other.jsonl")))
    shutil.copytree(tiny_folder, tmp_path / "base")
    spoil(tmp_path / "base" / "model.safetensors")
    with pytest.raises(ConfigError, match="model_name_or_path: the base model has other weights"):
        run(half(model_name_or_path=str(tmp_path / "base")))
    assert checkpoints(half()) == ["checkpoint-2", "checkpoint-4"]


def test_a_signal_in_an_evaluation_ends_it_and_it_is_made_again(half: Any, stop_in: Any) -> None:
    stop_in(4, what="evaluate")
    lines = stopped(half())
    assert lines[-1].startswith(f"saved {half().output_dir}/checkpoint-4 · ")
    assert not any(line.startswith("step ") for line in lines)
    lines = run(half())
    assert lines[0].startswith(f"going on from {half().output_dir}/checkpoint-4 ")
    assert sum("evaluation loss" in line for line in lines) == 2  # after step 4, and step 6


def test_a_signal_before_the_first_step_leaves_everything_as_it_is(
    half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load_tokenizer", "load_dataset", "load_base"):
        config = half()
        with monkeypatch.context() as patch:
            patch.setattr(prepare, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGHUP))
            with pytest.raises(Stopped) as caught:
                run(config)
        assert caught.value.exit_code == 129
        assert not caught.value.is_told
    assert checkpoints(half()) == ["checkpoint-2", "checkpoint-4"]
