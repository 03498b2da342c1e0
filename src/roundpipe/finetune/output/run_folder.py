"""The folder of one run: whose it is, what it holds already, and how files get into it.

The same command may be given again at any time, so the folder answers first:

==============  ============================================  ====================================
state           how it is recognised                          what the command does
==============  ============================================  ====================================
new             no ``config.yaml`` of ours                    trains
unfinished      ``config.yaml``, no complete result           starts over, and says so
finished        ``trainer_state.json`` at its last step       says so and ends well
==============  ============================================  ====================================

Rules
1. A folder with another config, or with files that are not of a run, is refused, unless
   ``overwrite_output_dir`` is set; the base model's own folder is refused always.
2. Nothing of an earlier run is removed before everything that can fail early (data, model) worked:
   ``start`` is called just before the first step.
3. A file is complete or absent: written under another name, then renamed. ``trainer_state.json``
   comes last, so a finished run is one whose every other file is there.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roundpipe.durable import sync, write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import dump_config
from roundpipe.store.folder_lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.settings.config import TrainConfig

CONFIG_FILE = "config.yaml"
STATE_FILE = "trainer_state.json"
LOG_FILE = "trainer_log.jsonl"
_MARK = "# The resolved config of a run of roundpipe train; it loads again as a config.\n"
_RESULTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    STATE_FILE,
    LOG_FILE,
    "training_loss.png",
    "timeline.json",
    "run.log",
    "interrupted",
)
# What may differ between two runs that are the same run: where and how it runs, not what it learns.
_FREE_KEYS = frozenset(
    {"output_dir", "overwrite_output_dir", "devices", "machine", "logging_steps", "report_to"}
    | {"device_memory_limit", "host_memory_limit", "pinned_memory_limit"}
)


class RunState(enum.Enum):
    """What the folder held when the command was given."""

    NEW = "new"
    UNFINISHED = "unfinished"  # a run began here and left no result
    FINISHED = "finished"  # the result of this very config is here


class RunFolder:
    """An output folder that this process holds; made by ``claim``."""

    def __init__(self, path: Path, state: RunState) -> None:
        self.path = path
        self.state = state

    def start(self, config: TrainConfig, *, replace: bool) -> None:
        """Write ``config.yaml`` and begin an empty log; with ``replace`` drop an earlier result."""
        names = _RESULTS if replace else (LOG_FILE, "run.log", "timeline.json")
        for path in [path for name in names for path in self.path.glob(name)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept = config.model_copy(update={"overwrite_output_dir": False})  # asked for once
        write_text(self.path / CONFIG_FILE, _MARK + dump_config(kept))

    def append_log(self, record: dict[str, Any]) -> None:
        """Append one JSON line to ``trainer_log.jsonl`` and flush it."""
        with (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, state: dict[str, Any]) -> None:
        """Write ``trainer_state.json``, which makes this a finished run."""
        write_text(self.path / STATE_FILE, json.dumps(state, indent=2) + "\n")

    @contextlib.contextmanager
    def files_in_place(self, target: str = "") -> Iterator[Path]:
        """Give an empty folder to write into; move its files to ``target`` when the block ends.

        After an error nothing is moved and the empty folder is gone.
        """
        destination = self.path / target
        staging = self.path / f".saving-{os.getpid()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            mode = _usual_mode(staging)
            yield staging
            for file in staging.iterdir():
                file.chmod(mode)  # safetensors writes files that only their owner may read
                sync(file)
            destination.mkdir(exist_ok=True)
            for file in sorted(staging.iterdir()):
                file.replace(destination / file.name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def claim(config: TrainConfig) -> Iterator[RunFolder]:
    """Hold ``config.output_dir`` for this process and say what it holds already.

    Makes the folder if need be, and takes it away again if it stays empty. Raises ConfigError when
    another live process holds it, when it belongs to a run with another config (each difference is
    listed), or when it is no run's folder but has files that a run would replace.
    """
    path = Path(config.output_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output_dir: not a folder: {config.output_dir}\nhint: output_dir=out")
    _refuse_model_folder(config, path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    _make_folder(path)
    try:
        with lock_folder(path, key="output_dir"):
            yield RunFolder(path, _judge(config, path))
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: the run wrote something
                folder.rmdir()


def dataset_digest(config: TrainConfig) -> str:
    """SHA-256 over the data files of ``config``, so that edited data is seen as a change."""
    digest = hashlib.sha256()
    for entry in (*config.dataset, *(config.eval_dataset or ())):
        path = Path(entry.path).expanduser()
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _judge(config: TrainConfig, path: Path) -> RunState:
    old = _read_config(path)
    if old is None:
        _refuse_foreign_files(config, path)
        return RunState.NEW
    state = _read_state(path)
    if config.overwrite_output_dir:
        return RunState.NEW
    changes = _changes(config, old, state)
    if changes:
        raise ConfigError(
            f"output_dir: {config.output_dir} holds a run with another config:\n"
            + "\n".join(f"  {line}" for line in changes)
            + "\nhint: output_dir=ANOTHER keeps both, overwrite_output_dir=true replaces it"
        )
    return RunState.FINISHED if state is not None else RunState.UNFINISHED


def _changes(config: TrainConfig, old: dict[str, Any], state: dict[str, Any] | None) -> list[str]:
    new = _plain(config)
    keys = [key for key in {**new, **old} if key not in _FREE_KEYS]
    lines = [
        f"{key}: {_brief(old.get(key))} there, {_brief(new.get(key))} now"
        for key in keys
        if old.get(key) != new.get(key)
    ]
    digest = (state or {}).get("dataset_sha256")
    if not lines and digest not in (None, dataset_digest(config)):
        lines.append("dataset: the content of the files has changed")
    return lines


def _plain(config: TrainConfig) -> dict[str, Any]:
    """The config as YAML gives it back."""
    plain: dict[str, Any] = yaml.safe_load(dump_config(config))
    return plain


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_config(path: Path) -> dict[str, Any] | None:
    try:
        text = (path / CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None
    return yaml.safe_load(text) if text.startswith(_MARK) else None


def _read_state(path: Path) -> dict[str, Any] | None:
    """The state of a finished run, or None."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_weights = any(path.glob("*.safetensors"))
    is_done = isinstance(state, dict) and state.get("global_step") == state.get("max_steps")
    return state if is_done and has_weights else None


def _refuse_foreign_files(config: TrainConfig, path: Path) -> None:
    if (path / CONFIG_FILE).exists():  # perhaps the user's own, with comments: never replaced
        raise ConfigError(
            f"output_dir: a config.yaml that is not a run's is in: {config.output_dir}\n"
            "hint: output_dir=ANOTHER, or give that file another name"
        )
    found = sorted({entry.name for name in _RESULTS for entry in path.glob(name)})
    if found and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: not a run's folder: {config.output_dir} has {', '.join(found[:4])}\n"
            "hint: output_dir=ANOTHER, or overwrite_output_dir=true to replace these files"
        )


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
