"""The folder of one run, held by this process, and how files get into it.

Rules
1. What an earlier run left is judged first (`earlier.py`): the same command may be given again at
   any time.
2. Nothing of an earlier run is removed before everything that can fail early (data, model) worked:
   ``start`` is called just before the first step.
3. A file is complete or absent: written under another name, then renamed. ``trainer_state.json``
   comes last, so a finished run is one whose every other file is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.checkpoint.find import checkpoints_in
from roundpipe.durable import remove_folder, sync, write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import (
    CONFIG_FILE,
    LOG_FILE,
    RESULTS,
    STATE_FILE,
    Earlier,
    RunState,
    judge,
    uncounted,
)
from roundpipe.finetune.settings.config import dump_config
from roundpipe.finetune.settings.parse import RESOLVED
from roundpipe.store.folder_lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roundpipe.finetune.output.earlier import Counting
    from roundpipe.finetune.settings.config import TrainConfig

SAVE_NOW = "save-now"
_EARLIER_RUNS = (LOG_FILE, "run.log", "timeline.json", "checkpoint-*")


class RunFolder:
    """An output folder that this process holds; made by ``claim``.

    ``shown``: the folder as the user wrote it, for messages.
    """

    def __init__(self, path: Path, earlier: Earlier, shown: str) -> None:
        self.path = path
        self.earlier = earlier
        self.shown = shown.rstrip("/") or shown

    @property
    def state(self) -> RunState:
        """What the folder held when the command was given."""
        return self.earlier.state

    def start(self, config: TrainConfig, history: Sequence[dict[str, Any]] = ()) -> None:
        """Make the folder that of this run, whose log so far is ``history``.

        A run that goes on keeps what is there; one that starts over begins an empty log; a new one
        drops an earlier result. Where a run goes on with something changed, checkpoints of later
        steps are dropped: those steps will be others. Raises ConfigError where the disk fails.
        """
        try:
            self._start(config, history)
        except OSError as error:
            raise ConfigError(
                f"output_dir: cannot be written to: {self.shown}: {error.strerror or error}"
                "\nhint: make room there, or output_dir=ANOTHER"
            ) from error

    def _start(self, config: TrainConfig, history: Sequence[dict[str, Any]]) -> None:
        checkpoint = self.earlier.checkpoint
        if checkpoint is None:
            self._remove(RESULTS if self.state is RunState.NEW else _EARLIER_RUNS)
        else:
            self._remove((STATE_FILE,))
            if self.earlier.is_other:
                self._drop_later(self.earlier.step)
        (self.path / SAVE_NOW).unlink(missing_ok=True)
        write_text(self.path / CONFIG_FILE, config_text(config))
        if checkpoint is not None:
            write_text(self.path / LOG_FILE, _lines(history))

    def _remove(self, patterns: Sequence[str]) -> None:
        for path in [path for pattern in patterns for path in self.path.glob(pattern)]:
            if path.is_dir() and not path.is_symlink():
                remove_folder(path)
            else:
                path.unlink()

    def _drop_later(self, step: int) -> None:
        for path in checkpoints_in(self.path):
            if int(path.name.rpartition("-")[2]) > step:
                remove_folder(path)

    def append_log(self, record: dict[str, Any]) -> None:
        """Append one JSON line to ``trainer_log.jsonl`` and flush it. Raises OSError."""
        with (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def is_saving_asked(self) -> bool:
        """Whether somebody has made a file ``save-now`` here."""
        return (self.path / SAVE_NOW).exists()

    def saving_done(self) -> None:
        """Take ``save-now`` away."""
        with contextlib.suppress(OSError):
            (self.path / SAVE_NOW).unlink()

    def finish(self, state: dict[str, Any]) -> None:
        """Write ``trainer_state.json``, which makes this a finished run, and the log it holds."""
        write_text(self.path / LOG_FILE, _lines(state["log_history"]))
        write_text(self.path / STATE_FILE, json.dumps(state, indent=2) + "\n")

    @contextlib.contextmanager
    def files_in_place(self) -> Iterator[Path]:
        """Give an empty folder to write into; move its files here when the block ends.

        After an error nothing is moved and the empty folder is gone.
        """
        # As `roundpipe.durable` names what is being written, and clears away of dead processes.
        staging = self.path / f".saving-result-{os.getpid() & 0xFFFFFFFF:08x}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            mode = _usual_mode(staging)
            yield staging
            for file in staging.iterdir():
                file.chmod(mode)  # safetensors writes files that only their owner may read
                sync(file)
            for file in sorted(staging.iterdir()):
                file.replace(self.path / file.name)
            sync(self.path)  # before the file that says that all are there
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _lines(history: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in history)


def config_text(config: TrainConfig) -> str:
    """``config.yaml``: the resolved config, without what was asked for once."""
    kept = {"overwrite_output_dir": False, "resume_from_checkpoint": "auto"}
    return RESOLVED + dump_config(config.model_copy(update=kept))


@contextlib.contextmanager
def claim(
    config: TrainConfig,
    counting: Counting = uncounted,
    *,
    judged: Callable[[TrainConfig, Path, Counting], Earlier] = judge,
) -> Iterator[RunFolder]:
    """Hold ``config.output_dir`` for this process and say what it holds already.

    ``counting``: see `judge`; ``judged``: what judges in its place. Makes the folder if need be,
    and takes it away again if it stays empty. Raises ConfigError when another live process holds
    it, and for what `judge` refuses.
    """
    path = Path(config.output_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output_dir: not a folder: {config.output_dir}\nhint: output_dir=out")
    _refuse_model_folder(config, path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    _make_folder(path)
    try:
        with lock_folder(path, key="output_dir"):
            yield RunFolder(path, judged(config, path, counting), config.output_dir)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: the run wrote something
                folder.rmdir()


def _refuse_model_folder(config: TrainConfig, path: Path) -> None:
    base = Path(config.model_name_or_path).expanduser()
    if base.is_dir() and path.is_dir() and base.samefile(path):
        raise ConfigError(
            f"output_dir: the same folder as model_name_or_path: {config.output_dir}\n"
            "hint: output_dir=ANOTHER; the base model is never written to"
        )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        raise ConfigError(
            f"output_dir: cannot make the folder: {path}: {reason}\nhint: output_dir=ANOTHER"
        ) from error


def _usual_mode(folder: Path) -> int:
    """The mode that a new file gets here."""
    probe = folder / ".probe"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode
