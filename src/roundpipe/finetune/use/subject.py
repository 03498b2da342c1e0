"""What RUN names: the result of a run, a checkpoint, a model, an adapter with its base.

    a run's folder   finished: its result; else its newest checkpoint that is whole, which is said
    a checkpoint     every file that is used is compared with what the manifest says of it
    an adapter       and the model that it was trained on, as it, or its run, says
    a model          a folder, a hub id, a GGUF file, a file in a Python package

Decided from names and small files; of the hub, these are fetched. Whatever is wrong is a
ConfigError before a weight is read.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.checkpoint.find import checkpoints_in
from roundpipe.checkpoint.manifest import MANIFEST, check, read_manifest
from roundpipe.durable import fingerprint as file_fingerprint
from roundpipe.errors import ConfigError
from roundpipe.finetune.model.hub import fetch
from roundpipe.finetune.model.source import ModelSource, locate_model
from roundpipe.finetune.output.earlier import CONFIG_FILE, STATE_FILE
from roundpipe.finetune.settings.config import make_config
from roundpipe.finetune.settings.parse import near_file, read_file
from roundpipe.finetune.use.request import run_folder
from roundpipe.models.loading.distrust import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roundpipe.checkpoint.manifest import Manifest
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.settings.config import TrainConfig

_ADAPTER = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_LARGEST_CONFIG = 16 << 20  # bytes
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[^@\s]+)?")
_NOT_A_MODEL = "an adapter, not a model"
_STATE = re.compile(r"optimizer-.*|state\..*")  # files that only training reads
_CHECKPOINT = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True)
class Subject:
    """A model, or an adapter and its base.

    ``source``: the whole model, or the base of the adapter; ``adapter``: the folder of its files;
    ``run``: the output_dir of the run that it comes from, and ``config`` that run's; ``folder``:
    where its files lie, if they are on this machine; ``base_mark``: what the base was when it was
    trained on (`roundpipe.finetune.model.fingerprint`), where that is known.
    """

    given: str
    source: ModelSource
    adapter: Path | None = None
    run: Path | None = None
    config: TrainConfig | None = None
    folder: Path | None = None
    base_mark: str | None = None

    @property
    def name(self) -> str:
        """A short name for people."""
        if self.adapter is None and self.run is None:
            return self.source.name
        return self.given.rstrip("/")


def find_subject(given: str, terminal: Terminal, *, base: str | None = None) -> Subject:
    """Say what ``given`` (RUN) names; ``base`` is the base model, whatever an adapter says.

    Fetches the small files of what lies on the hub, and an adapter of it whole; reads a checkpoint.
    Raises ConfigError with a way out, PlanError where the disk has no room for a download.
    """
    folder = Path(given).expanduser()
    if folder.is_dir():
        return _in_folder(given, folder, terminal, base)
    is_in_a_run = folder.parent != Path() and run_folder(folder.parent) is not None
    if is_in_a_run and not folder.exists():  # no id of the hub
        raise ConfigError(f"no such folder: {given}\nhint: {near_file(folder)}")
    if _HUB_ID.fullmatch(given) and not given.startswith("."):
        return _on_hub(given, terminal, base)
    with of_run(given):
        source = locate_model(given)
    try:
        with of_run(given):
            return _whole(given, source, terminal, base)
    except ConfigError as error:
        if not source.is_hub:
            raise
        raise ConfigError(f"no such folder: {given}; as a hub id: {error}") from error


def _in_folder(given: str, folder: Path, terminal: Terminal, base: str | None) -> Subject:
    run = run_folder(folder)
    if _is_checkpoint(folder):
        manifest = _verified(folder, terminal)
        if run is not None and folder.resolve().parent != run:
            run = run_folder(folder.resolve().parent) and folder.parent
        return _of_files(given, folder, terminal, base, run=run, marks=manifest.about)
    if run is None:
        return _of_files(given, folder, terminal, base)
    state = _state_of(folder)
    if state is not None:
        return _of_files(given, folder, terminal, base, run=run, marks=state)
    checkpoint, manifest = _newest(given, folder, terminal)
    return _of_files(given, checkpoint, terminal, base, run=run, marks=manifest.about)


def _of_files(
    given: str,
    folder: Path,
    terminal: Terminal,
    base: str | None,
    *,
    run: Path | None = None,
    marks: Mapping[str, Any] | None = None,
) -> Subject:
    """The subject whose files lie in ``folder``."""
    config = None
    if run is not None:
        config = make_config(read_file(str(folder / CONFIG_FILE)))[0]
    if (folder / _ADAPTER_CONFIG).is_file() and _is_adapter(folder):
        marks = marks or {}
        bare = ModelSource(given="", location="")
        subject = Subject(given, bare, None, run, config, folder, marks.get("base"))
        return _adapter(subject, terminal, base, marks.get("commit"))
    with of_run(given):
        source = locate_model(str(folder))
        found = _whole(given, replace(source, given=given), terminal, base)
    return replace(found, run=run, config=config, folder=folder)


def _is_adapter(folder: Path) -> bool:
    """Whether what lies in a folder is an adapter; some have the base's config.json beside it."""
    has_adapter = (folder / _ADAPTER).is_file()
    return has_adapter or not any(folder.glob("model*.safetensors"))


def _adapter(subject: Subject, terminal: Terminal, base: str | None, commit: str | None) -> Subject:
    """The adapter in ``subject.folder`` with its base, whose small files are here then.

    ``commit``: of a base on the hub, which it was at when it was trained on.
    """
    folder = subject.folder
    assert folder is not None
    if not (folder / _ADAPTER).is_file():
        raise ConfigError(
            f"no {_ADAPTER} in: {subject.given}\n"
            "hint: a pickle (adapter_model.bin) can run any code, so it is not opened; where you "
            "trust it, load it with peft once and save it again"
        )
    if base is not None:
        source = fetch(locate_model(base), terminal)
        return replace(subject, source=source, adapter=folder, base_mark=None)
    named, revision = _told(subject)
    try:
        source = locate_model(named, revision)
        if source.is_hub and source.revision is None and commit is not None:
            source = replace(source, revision=commit)
        source = fetch(source, terminal)
    except ConfigError as error:
        reason, _, way_out = str(error).partition("\nhint: ")
        raise ConfigError(
            f"the base of {subject.given} cannot be opened: "
            f"{reason.removeprefix('model_name_or_path: ')}\n"
            f"hint: model_name_or_path=FOLDER or a hub id, where it is now ({way_out})"
        ) from error
    return replace(subject, source=source, adapter=folder)


def _told(subject: Subject) -> tuple[str, str | None]:
    """The base that an adapter was trained on, and its revision, as its run or its config says."""
    if subject.config is not None:
        return subject.config.model_name_or_path, None
    assert subject.folder is not None
    fields = read_json(subject.folder / _ADAPTER_CONFIG, _LARGEST_CONFIG, pairs=dict)
    fields = fields if isinstance(fields, dict) else {}
    named, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"the adapter does not say which model it is of: {subject.given}\n"
            "hint: model_name_or_path=FOLDER or a hub id, the model it was trained on"
        )
    return named, revision if isinstance(revision, str) and revision else None


def _whole(given: str, source: ModelSource, terminal: Terminal, base: str | None) -> Subject:
    if base is not None:
        raise ConfigError(
            f"a whole model, which has no base beside it: {given}\n"
            "hint: leave out model_name_or_path"
        )
    source = fetch(source, terminal)
    folder = Path(source.location) if source.is_here and source.gguf_file is None else None
    return Subject(given, source, folder=folder)


def _on_hub(given: str, terminal: Terminal, base: str | None) -> Subject:
    """A model of the hub, or an adapter there."""
    try:
        with of_run(given):
            return _whole(given, locate_model(given), terminal, None)
    except ConfigError as error:
        if _NOT_A_MODEL not in str(error):
            raise
    from roundpipe.finetune.model.started import adapter_folder  # noqa: PLC0415 (imports peft)

    with terminal.waiting(f"asking the hub for {given}"), of_run(given):
        folder = adapter_folder(given)
    subject = Subject(given, ModelSource(given="", location=""), folder=folder)
    return _adapter(subject, terminal, base, None)


# ---- runs and checkpoints


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ours, whole or cut off."""
    if (folder / MANIFEST).is_file():
        return True
    is_named = _CHECKPOINT.fullmatch(folder.resolve().name) is not None
    return is_named and run_folder(folder.resolve().parent) is not None


def _state_of(folder: Path) -> dict[str, Any] | None:
    """What a finished run says of itself, or None."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_weights = any(folder.glob("*model*.safetensors"))
    return state if isinstance(state, dict) and has_weights else None


def _newest(given: str, folder: Path, terminal: Terminal) -> tuple[Path, Manifest]:
    """The newest checkpoint of an unfinished run that is whole; which it is, is said."""
    reasons = []
    for path in reversed(checkpoints_in(folder)):
        try:
            manifest = _verified(path, terminal)
        except ConfigError as error:
            reasons.append(str(error).partition("\n")[0])
            terminal.line(f"left out: {reasons[-1]}")
            continue
        terminal.line(
            f"{given} is not finished: its newest checkpoint is taken: {path.name}"
            + _of_all(path, manifest)
        )
        return path, manifest
    what = "no checkpoint that is whole" if reasons else "neither a result nor a checkpoint yet"
    raise ConfigError(
        f"the run has {what}: {given}\nhint: the command that began it goes on; "
        f"`touch {given.rstrip('/')}/save-now` has a running one save at its next step"
    )


def _of_all(path: Path, manifest: Manifest) -> str:
    state = {}
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    most = state.get("max_steps") if isinstance(state, dict) else None
    if manifest.step is None or not isinstance(most, int):
        return ""
    return f" (step {manifest.step:,} of {most:,})"


def _verified(folder: Path, terminal: Terminal) -> Manifest:
    """The manifest of a checkpoint, every file that is used compared with it."""
    if not (folder / MANIFEST).is_file():
        return read_manifest(folder)  # which says why not
    manifest = check(folder, by_size=True)
    used = {name: said for name, said in manifest.files.items() if not _STATE.fullmatch(name)}
    done = 0
    total = sum(said.num_bytes for said in used.values())
    with terminal.counting(f"checking {folder.name}", total) as show:

        def tell(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            show(done)

        for name, said in used.items():
            if file_fingerprint(folder / name, tell) != said:
                raise ConfigError(
                    f"not what was written, its SHA-256 is another: {folder / name}\n"
                    "hint: take an older checkpoint, or copy this one again"
                )
    return manifest


@contextlib.contextmanager
def of_run(given: str, *, folder: Path | None = None) -> Iterator[None]:
    """Say what is wrong with RUN in its own words, not in those of a config's key.

    ``folder``: where its files lie, which may be a cache that nobody has heard of.
    """
    try:
        yield
    except ConfigError as error:
        told, _, way_out = str(error).partition("\nhint: ")
        for key in ("model_name_or_path: ", "adapter_name_or_path: "):
            told = told.removeprefix(key)
        if folder is not None:
            told = told.replace(str(folder), given)
        way_out = way_out.removeprefix("model_name_or_path=")  # RUN is a word alone
        if told.startswith("no such folder"):
            told = f"nothing is called like that: {given}"
            way_out = "a run's folder, a model or adapter folder, a hub id such as owner/name"
        if folder is not None and not folder.exists():
            told = f"gone meanwhile: {folder}; a run under way drops its older checkpoints"
            way_out = "the same command again takes the newest"
        raise type(error)(f"{told}\nhint: {way_out}") from error
