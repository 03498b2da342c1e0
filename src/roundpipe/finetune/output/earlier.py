"""What an earlier run left in an output folder, and what the same command does about it.

==============  ==============================================  =================================
state           how it is recognised                            what the command does
==============  ==============================================  =================================
new             no ``config.yaml`` of ours                      trains
unfinished      ``config.yaml``, a whole checkpoint             goes on, and says so
unfinished      ``config.yaml``, no checkpoint                  starts over, and says so
unfinished      ``config.yaml``, none that is whole             refuses: weights would be lost
finished        ``trainer_state.json``, which is written last   says so and ends well
==============  ==============================================  =================================

A folder with another config, or with files that are not of a run, is refused, unless
``overwrite_output_dir`` is set. Where and how a run works may differ (`FREE_KEYS`). Places (a path
of data or model) may differ while a run goes on: content is compared when it is at hand, see
`roundpipe.finetune.run.content`. ``resume_from_checkpoint=auto``, said by the user, allows every
difference; a folder named there is where the run goes on. Both said: an unfinished run of the same
config goes on, any other is replaced.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic_core import PydanticUndefined

from roundpipe.checkpoint.find import check, checkpoints_in, manifest_of
from roundpipe.durable import clear_leftovers
from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.finetune.settings.config import TrainConfig, dump_config
from roundpipe.finetune.settings.parse import RESOLVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from roundpipe.checkpoint.manifest import Manifest

    Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

CONFIG_FILE = "config.yaml"
STATE_FILE = "trainer_state.json"
LOG_FILE = "trainer_log.jsonl"
RESULTS = (
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
    "checkpoint-*",
)
# What may differ between two runs that are the same run: where and how it runs, not what it learns.
FREE_KEYS = frozenset(
    {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "devices", "machine"}
    | {"device_memory_limit", "host_memory_limit", "pinned_memory_limit", "dataset_prepared_path"}
    | {"save_minutes", "save_steps", "save_strategy", "save_total_limit", "save_only_model"}
    | {"logging_steps", "report_to", "run_name", "project", "dataset_num_proc"}
)
_PLACES = ("model_name_or_path", "adapter_name_or_path")
_DATA = ("dataset", "eval_dataset")


class RunState(enum.Enum):
    """What the folder held when the command was given."""

    NEW = "new"
    UNFINISHED = "unfinished"  # a run began here and left no result
    FINISHED = "finished"  # the result of this very config is here


@dataclass(frozen=True)
class Earlier:
    """What the folder holds, and what follows from it.

    ``checkpoint``: where the run goes on; None: at its beginning. ``step``: the checkpoint's;
    ``manifest``: what it was found to be when all of it was read.
    ``is_other``: the user lets it go on even if something differs. ``lines``: to be shown first.
    """

    state: RunState
    checkpoint: Path | None = None
    step: int = 0
    is_other: bool = False
    lines: tuple[str, ...] = ()
    manifest: Manifest | None = field(default=None, compare=False, repr=False)


@contextlib.contextmanager
def uncounted(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Nobody wants to know how far it is."""
    yield lambda _: None


def judge(config: TrainConfig, path: Path, counting: Counting = uncounted) -> Earlier:
    """Say what ``path``, the output folder of ``config``, holds. Reads the newest checkpoint whole.

    ``counting``: as `Terminal.counting`; that takes minutes where a checkpoint is large.
    Raises ConfigError for another config (each difference is listed), for files of others that a
    run would replace, where no checkpoint is whole, and for a named one that cannot be gone on
    from.
    """
    is_said = "resume_from_checkpoint" in config.model_fields_set
    wish = config.resume_from_checkpoint if is_said else None
    old = _read_config(path)
    if old is None:
        _refuse_foreign_files(config, path)
    if wish not in (None, "auto", "none"):
        began = None if config.overwrite_output_dir else old
        return named(config, str(wish), began, counting)
    if old is None or (config.overwrite_output_dir and wish != "auto"):
        return Earlier(RunState.NEW)
    state = _read_state(path)
    changes = _changes(config, old, state)
    if config.overwrite_output_dir:
        is_replaced = changes or state is not None
        return Earlier(RunState.NEW) if is_replaced else newest(config, path, counting)
    if changes and wish != "auto":
        raise _another(config, changes)
    if state is not None and not changes:
        return Earlier(RunState.FINISHED)
    if wish == "none":
        return Earlier(RunState.UNFINISHED, lines=("starting over, as asked",))
    found = newest(config, path, counting)
    if found.checkpoint is None and state is not None:
        raise _nowhere_to_go_on(config, "a finished run", found.lines[1:])
    if found.checkpoint is None and len(found.lines) > 1:
        raise _nowhere_to_go_on(config, "an unfinished run", found.lines[1:])
    return replace(found, is_other=is_said, lines=(*found.lines, *_with_changes(changes)))


def _another(config: TrainConfig, changes: list[str]) -> ConfigError:
    return ConfigError(
        f"output_dir: {config.output_dir} holds a run with another config:\n"
        + "\n".join(f"  {line}" for line in changes)
        + "\nhint: output_dir=ANOTHER keeps both, overwrite_output_dir=true replaces it, "
        "resume_from_checkpoint=auto goes on with what is new"
    )


def _nowhere_to_go_on(config: TrainConfig, what: str, broken: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"resume_from_checkpoint: {config.output_dir} holds {what} without a checkpoint to go on "
        f"from{':' if broken else ''}\n"
        + "".join(f"  {line}\n" for line in broken)
        + "hint: output_dir=ANOTHER keeps it, overwrite_output_dir=true trains anew in its place"
    )


def newest(config: TrainConfig, path: Path, counting: Counting) -> Earlier:
    """Go on from the newest checkpoint that is whole, if there is any."""
    broken: list[str] = []
    for folder in _newest_first(path):
        manifest = _checked(folder, counting)
        if not isinstance(manifest, str):
            step, of = _step_of(folder)
            line = f"going on from {shown(config, folder)} (step {step:,}{of})"
            return Earlier(
                RunState.UNFINISHED, folder, step, lines=(line, *broken), manifest=manifest
            )
        broken.append(f"{shown(config, folder)} is left out: {manifest}")
    why = f"{config.output_dir} holds an unfinished run without a checkpoint"
    return Earlier(RunState.UNFINISHED, lines=(f"starting over: {why}", *broken))


def _with_changes(changes: list[str]) -> Iterator[str]:
    if changes:
        yield f"with another config: {'; '.join(changes)}"


def named(
    config: TrainConfig, given: str, old: dict[str, Any] | None, counting: Counting
) -> Earlier:
    """From the checkpoint that the user names."""
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"resume_from_checkpoint: no such folder: {given}\n"
            "hint: resume_from_checkpoint=out/checkpoint-500, auto or none"
        )
    manifest = _checked(folder, counting)
    if isinstance(manifest, str):
        raise ConfigError(
            f"resume_from_checkpoint: {given} cannot be gone on from: {manifest}\n"
            "hint: resume_from_checkpoint=auto takes the newest that is whole"
        )
    step, of = _step_of(folder)
    began = _read_config(folder) or old
    changes = [] if began is None else _changes(config, began, None)
    lines = (f"going on from {given} (step {step:,}{of})", *_with_changes(changes))
    state = RunState.NEW if old is None else RunState.UNFINISHED
    return Earlier(state, folder, step, is_other=True, lines=lines, manifest=manifest)


def shown(config: TrainConfig, folder: Path) -> str:
    """A checkpoint as messages name it."""
    return f"{config.output_dir.rstrip('/')}/{folder.name}"


def _newest_first(path: Path) -> list[Path]:
    clear_leftovers(path)
    return list(reversed(checkpoints_in(path)))


def _checked(folder: Path, counting: Counting) -> Manifest | str:
    """The manifest of a whole checkpoint, or why nothing can go on from this one."""
    try:
        manifest = manifest_of(folder)
        if manifest.about.get("only_model"):
            return "it has the model alone (save_only_model)"
        if STATE_FILE not in manifest.files:
            return f"it is not of a run of roundpipe train: no {STATE_FILE}"
        with counting(f"checking {folder.name}", manifest.num_bytes) as show:
            return check(folder, tell=show)
    except RoundPipeError as error:
        return str(error).partition("\n")[0]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _step_of(folder: Path) -> tuple[int, str]:
    """The step of a checkpoint, and of how many in words."""
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    most = state.get("max_steps")
    return int(state["global_step"]), f" of {most:,}" if isinstance(most, int) else ""


# ---- the config


def _changes(config: TrainConfig, old: dict[str, Any], state: dict[str, Any] | None) -> list[str]:
    """What differs; of places only their content counts, where that is known."""
    new = _plain(config)
    is_finished = state is not None
    old = {**_defaults_beside(old), **old}
    keys = [key for key in {**new, **old} if key not in FREE_KEYS]
    changed = [
        key
        for key in keys
        if _compared(key, old.get(key), is_finished) != _compared(key, new.get(key), is_finished)
    ]
    digest = (state or {}).get("dataset_sha256")
    is_same_data = digest is not None and digest == dataset_digest(config)
    if is_same_data:
        changed = [key for key in changed if key not in _DATA or not _same_but_place(key, old, new)]
    if "model_name_or_path" in changed and _is_same_base(config, state):
        changed.remove("model_name_or_path")
    lines = [f"{key}: {_brief(old.get(key))} there, {_brief(new.get(key))} now" for key in changed]
    if not lines and digest is not None and not is_same_data:
        lines.append("dataset: the content of the files has changed")
    return lines


def _defaults_beside(old: dict[str, Any]) -> dict[str, Any]:
    """Settings that were not known yet when a config was written, as they were in effect."""
    fields = TrainConfig.model_fields
    known = {name: field.default for name, field in fields.items() if name not in old}
    return {name: value for name, value in known.items() if value is not PydanticUndefined}


def _is_same_base(config: TrainConfig, state: dict[str, Any] | None) -> bool:
    """Whether the base model of a finished run lies in another place now."""
    known = (state or {}).get("base")
    if known is None:
        return False
    from roundpipe.finetune.model.fingerprint import fingerprint  # noqa: PLC0415, torch
    from roundpipe.finetune.model.source import locate_model  # noqa: PLC0415

    source = locate_model(config.model_name_or_path)
    return source.is_here and fingerprint(source) == known


def _compared(key: str, value: Any, is_finished: bool) -> Any:
    if is_finished:
        return value
    if key in _PLACES:
        return value is None
    return _without_places(value) if key in _DATA else value


def _same_but_place(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    return bool(_without_places(old.get(key)) == _without_places(new.get(key)))


def _without_places(entries: Any) -> Any:
    """Entries of a dataset without where they lie; a path alone is an entry."""
    if entries is None:
        return None
    listed = entries if isinstance(entries, list) else [entries]
    plain = [{} if isinstance(entry, str) else dict(entry) for entry in listed]
    return [{k: v for k, v in e.items() if k not in ("path", "data_files")} for e in plain]


def dataset_digest(config: TrainConfig) -> str:
    """SHA-256 over the data files of ``config``, so that edited data is seen as a change."""
    digest = hashlib.sha256()
    for entry in (*config.dataset, *(config.eval_dataset or ())):
        path = Path(entry.path).expanduser()
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
    if not text.startswith(RESOLVED):
        return None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict):
        raise ConfigError(
            f"output_dir: what a run has written there is damaged: {path / CONFIG_FILE}\n"
            "hint: output_dir=ANOTHER, or take that file away"
        )
    return content


def _read_state(path: Path) -> dict[str, Any] | None:
    """The state of a finished run, or None."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_weights = any(path.glob("*.safetensors"))
    return state if isinstance(state, dict) and has_weights else None


def _refuse_foreign_files(config: TrainConfig, path: Path) -> None:
    if (path / CONFIG_FILE).exists():  # perhaps the user's own, with comments: never replaced
        raise ConfigError(
            f"output_dir: a config.yaml that is not a run's is in: {config.output_dir}\n"
            "hint: output_dir=ANOTHER, or give that file another name"
        )
    found = sorted({entry.name for name in RESULTS for entry in path.glob(name)})
    if found and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: not a run's folder: {config.output_dir} has {', '.join(found[:4])}\n"
            "hint: output_dir=ANOTHER, or overwrite_output_dir=true to replace these files"
        )
