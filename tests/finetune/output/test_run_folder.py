import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import RunState, dataset_digest
from roundpipe.finetune.output.run_folder import claim
from roundpipe.finetune.settings.config import load_config
from roundpipe.finetune.settings.parse import RESOLVED

HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, str(os.getpid()).encode())
print("held", flush=True)
sys.stdin.read()
"""


def finish(config: Any, *, step: int = 3, of: int = 3) -> None:
    """Leave in the folder what a run leaves that made ``step`` of its steps."""
    with claim(config) as folder:
        folder.start(config)
        folder.append_log({"step": 1})
        with folder.files_in_place() as staging:
            (staging / "model.safetensors").write_text("weights")
        state = {"global_step": step, "max_steps": of, "log_history": [{"step": 1}]}
        folder.finish({**state, "dataset_sha256": None})


def state_of(config: Any) -> RunState:
    with claim(config) as folder:
        return folder.state


def test_a_missing_folder_is_new_and_does_not_stay_if_nothing_was_written(config_of: Any) -> None:
    config = config_of(output_dir=config_of().output_dir + "/deep/er")
    assert state_of(config) is RunState.NEW
    assert not Path(config.output_dir).parent.exists()


def test_a_run_without_a_result_is_unfinished(config_of: Any) -> None:
    config = config_of()
    with claim(config) as folder:
        folder.start(config)
    assert state_of(config) is RunState.UNFINISHED


def test_a_run_with_its_result_is_finished_also_with_other_devices(config_of: Any) -> None:
    finish(config_of())
    assert state_of(config_of()) is RunState.FINISHED
    assert state_of(config_of(devices="cpu*2", logging_steps=5)) is RunState.FINISHED


@pytest.mark.parametrize("lost", ["model.safetensors", "trainer_state.json"])
def test_a_result_that_was_taken_away_is_no_result(config_of: Any, lost: str) -> None:
    finish(config_of())
    Path(config_of().output_dir, lost).unlink()
    assert state_of(config_of()) is RunState.UNFINISHED


def test_the_written_config_loads_again_as_the_same_config(config_of: Any) -> None:
    config = config_of(sample_prompts=["a: b", "ünïcode"], warmup_steps=0.1)
    with claim(config) as folder:
        folder.start(config)
    assert load_config([str(Path(config.output_dir, "config.yaml"))])[0] == config


def test_a_changed_config_lists_each_difference_and_the_ways_out(config_of: Any) -> None:
    finish(config_of())
    with pytest.raises(ConfigError) as caught:
        state_of(config_of(learning_rate=3e-4, seed=7))
    text = str(caught.value)
    assert "learning_rate: 0.01 there, 0.0003 now" in text
    assert "seed: 42 there, 7 now" in text
    assert "hint: output_dir=ANOTHER" in text
    assert "overwrite_output_dir=true" in text


def test_edited_data_is_a_change(config_of: Any, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"text": "a"}\n')
    config = config_of(dataset=str(data))
    with claim(config) as folder:
        folder.start(config)
        with folder.files_in_place() as staging:
            (staging / "model.safetensors").write_text("weights")
        digest = dataset_digest(config)
        folder.finish({"global_step": 1, "log_history": [], "dataset_sha256": digest})
    assert state_of(config) is RunState.FINISHED
    data.write_text('{"text": "b"}\n')
    with pytest.raises(ConfigError, match="the content of the files has changed"):
        state_of(config)


def test_overwriting_is_new_and_drops_the_old_result_only_at_the_start(config_of: Any) -> None:
    finish(config_of())
    config = config_of(overwrite_output_dir=True, seed=7)
    folder = Path(config.output_dir)
    (folder / "notes.txt").write_text("mine")
    assert state_of(config) is RunState.NEW
    assert (folder / "model.safetensors").exists()
    with claim(config) as held:
        held.start(config)
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "notes.txt"]
    assert state_of(config_of(seed=7)) is RunState.UNFINISHED


def test_overwriting_that_stands_in_a_file_goes_on_with_an_unfinished_run(config_of: Any) -> None:
    standing = {"overwrite_output_dir": True, "resume_from_checkpoint": "auto"}
    with claim(config_of()) as folder:
        folder.start(config_of())
    assert state_of(config_of(**standing)) is RunState.UNFINISHED
    assert state_of(config_of(overwrite_output_dir=True)) is RunState.NEW
    assert state_of(config_of(**standing, seed=7)) is RunState.NEW
    finish(config_of())
    assert state_of(config_of(**standing)) is RunState.NEW


def test_starting_over_begins_an_empty_log(config_of: Any) -> None:
    config = config_of()
    with claim(config) as folder:
        folder.start(config)
        folder.append_log({"step": 1})
        (folder.path / "notes.txt").touch()
    with claim(config) as folder:
        assert folder.state is RunState.UNFINISHED
        assert folder.earlier.checkpoint is None
        assert [line.split(":")[0] for line in folder.earlier.lines] == ["starting over"]
        folder.start(config)
    found = sorted(path.name for path in Path(config.output_dir).iterdir())
    assert found == ["config.yaml", "notes.txt"]


def test_a_folder_with_files_of_others_is_refused(config_of: Any) -> None:
    folder = Path(config_of().output_dir)
    folder.mkdir()
    (folder / "data.jsonl").write_text("{}")
    assert state_of(config_of()) is RunState.NEW  # nothing there that a run would replace
    (folder / "model.safetensors").write_text("precious")
    with pytest.raises(ConfigError, match=r"not a run's folder: .* has model\.safetensors"):
        state_of(config_of())
    assert state_of(config_of(overwrite_output_dir=True)) is RunState.NEW


def test_a_config_that_the_user_wrote_is_never_replaced(config_of: Any) -> None:
    folder = Path(config_of().output_dir)
    folder.mkdir()
    (folder / "config.yaml").write_text("# my comments\nseed: 1\n")
    with pytest.raises(ConfigError, match=r"a config\.yaml that is not a run's"):
        state_of(config_of(overwrite_output_dir=True))


def test_the_base_models_folder_is_refused_even_for_overwriting(config_of: Any) -> None:
    config = config_of(output_dir=config_of().model_name_or_path, overwrite_output_dir=True)
    with pytest.raises(ConfigError, match="the same folder as model_name_or_path"):
        state_of(config)


def test_a_file_in_the_place_of_the_folder_is_refused(config_of: Any) -> None:
    Path(config_of().output_dir).write_text("a file")
    with pytest.raises(ConfigError, match="output_dir: not a folder"):
        state_of(config_of())


def test_a_folder_that_another_live_process_holds_is_refused_with_its_pid(config_of: Any) -> None:
    config = config_of()
    folder = Path(config.output_dir)
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by the live process {other.pid}"):
            state_of(config)
        other.kill()
    assert state_of(config) is RunState.NEW  # it ended without tidying up


def test_two_runs_in_one_process_do_not_share_a_folder(config_of: Any) -> None:
    config = config_of()
    with claim(config), pytest.raises(ConfigError, match=f"live process {os.getpid()}"):
        state_of(config)
    assert state_of(config) is RunState.NEW


def test_a_failed_save_leaves_neither_new_files_nor_leftovers(config_of: Any) -> None:
    finish(config_of())
    before = sorted(Path(config_of().output_dir).iterdir())

    def fail_to_save() -> None:
        with claim(config_of()) as folder, folder.files_in_place() as staging:
            (staging / "model.safetensors").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_to_save()
    assert sorted(Path(config_of().output_dir).iterdir()) == before
    assert Path(config_of().output_dir, "model.safetensors").read_text() == "weights"


def test_files_get_the_mode_that_new_files_have(config_of: Any) -> None:
    with claim(config_of()) as folder:
        with folder.files_in_place() as staging:
            (staging / "model.safetensors").touch(mode=0o600)
        (folder.path / "usual").touch()
        modes = {path.stat().st_mode for path in folder.path.iterdir() if path.name != ".lock"}
        assert len(modes) == 1


def test_the_log_is_a_json_line_for_each_record(config_of: Any) -> None:
    config = config_of()
    with claim(config) as folder:
        folder.start(config)
        folder.append_log({"step": 1, "loss": 0.5})
        text = Path(config.output_dir, "trainer_log.jsonl").read_text()
        assert json.loads(text) == {"step": 1, "loss": 0.5}  # there at once
        folder.append_log({"step": 2})
    assert len(Path(config.output_dir, "trainer_log.jsonl").read_text().splitlines()) == 2


def test_a_disk_that_takes_nothing_is_told_by_the_keys_name(config_of: Any) -> None:
    config = config_of()
    with claim(config) as folder:
        (folder.path / "config.yaml").mkdir()
        with pytest.raises(ConfigError, match=r"(?s)output_dir: cannot be written to: .*hint: "):
            folder.start(config)


def test_a_run_s_config_that_is_damaged_is_told(config_of: Any) -> None:
    config = config_of()
    with claim(config) as folder:
        folder.start(config)
        path = folder.path / "config.yaml"
    for damaged in ("a: [", "- 1\n", ""):
        path.write_text(RESOLVED + damaged)
        with pytest.raises(ConfigError, match=r"is damaged: .*config\.yaml"), claim(config):
            pass
