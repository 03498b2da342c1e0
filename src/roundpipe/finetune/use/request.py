"""What a command that uses a result was asked: RUN, the command's own options, and any key.

    roundpipe COMMAND RUN [option=value …] [key=value …]

The keys are those of `roundpipe train`; those that are not said are as the run had them (its
``config.yaml``), or as they are by default. In place of RUN stands also a config file: of a run
that was trained with it, or one of another trainer's that names a model and an adapter. Nothing of
this imports torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import CONFIG_FILE, STATE_FILE
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.config import count_devices, read_layers
from roundpipe.finetune.settings.parse import RESOLVED, near_file, parse_argv, read_file
from roundpipe.finetune.settings.translate import FIELDS, KNOWN, unfolded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from roundpipe.finetune.settings.config import TrainConfig

NO_DATA = "./-"  # stands for a dataset that is not given
_CONFIGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Request:
    """What is asked for.

    ``given``: RUN; ``settings``: all keys, of which ``said`` stand on the command line or in the
    config file that was given; ``base``: the base model, where it is said; ``run``: the folder of
    the run that the other keys come from; ``options``: values as they were read, by name.
    """

    given: str
    settings: TrainConfig
    said: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    run: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_dataset(self) -> bool:
        """Whether ``settings.dataset`` names data: the run's own, or what was said."""
        return self.settings.dataset[0].path != NO_DATA


def read_request(
    arguments: Sequence[str],
    *,
    options: Collection[str] = (),
    taken: Collection[str] = (),
    environment: Mapping[str, str],
    usage: str = "roundpipe COMMAND RUN [key=value …]",
) -> Request:
    """Read a command line; ``options`` are the names of the command's own, ``taken`` such as were
    taken out of it before.

    Raises ConfigError for what cannot be read, and where nothing is named.
    """
    word, values = _words(arguments, options, usage)
    _refuse_slips(values, [*options, *taken])
    values = unfolded(values)
    file: dict[str, Any] = {}
    if word is not None and _is_config(word):
        file = unfolded(read_file(word, environment))
        word = None
    chosen = {
        name: layer.pop(name) for layer in (file, values) for name in options if name in layer
    }
    said = {**file, **values}
    given = word or _named(file or values, said, usage)
    run = run_folder(Path(given).expanduser())
    inherited = {} if run is None else read_file(str(run / CONFIG_FILE))
    if file and run is not None:  # as it was trained, whatever the file says by now
        said, file = values, {}
    elif file and given == _value(file, "output_dir"):  # that names RUN, no place for a new one
        said = {key: each for key, each in said.items() if key in values or key != "output_dir"}
    base = _value(said, "model_name_or_path")
    reading = read_layers(
        inherited or {"model_name_or_path": base or given, "dataset": NO_DATA, **_canonical(file)},
        values,
        lambda devices: count_devices(devices, environment),
    )
    return Request(
        given=given,
        settings=reading.config,
        said=frozenset(_targets(said)),
        options=chosen,
        base=None if base is None or base == given else str(base),
        run=run,
        notes=tuple(reading.notes),
    )


def run_folder(folder: Path) -> Path | None:
    """The folder with the resolved config of a run: ``folder`` itself, a checkpoint or the run's.

    A checkpoint has one of its own, as the run was when it was saved.
    """
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as file:
            return folder if file.read(len(RESOLVED)) == RESOLVED.encode() else None
    except OSError:
        return None


def has_result(folder: Path) -> bool:
    """Whether a folder holds a model, an adapter, or a run that has begun."""
    names = ("adapter_config.json", "config.json", STATE_FILE)
    return any((folder / name).is_file() for name in names) or run_folder(folder) is not None


def _words(
    arguments: Sequence[str], options: Collection[str], usage: str
) -> tuple[str | None, dict[str, Any]]:
    try:
        return parse_argv(arguments, known=KNOWN.union(options))
    except ConfigError as error:
        if not str(error).startswith("two config files"):
            raise
        told = str(error).partition("\n")[0].removeprefix("two config files: ")
        raise ConfigError(f"two of RUN: {told}\nhint: {usage}") from None


def _refuse_slips(values: Mapping[str, Any], options: Sequence[str]) -> None:
    """Name the option that an unknown key nearly is; of keys `read_layers` says it."""
    for key in values.keys() - KNOWN - set(options):
        for near in difflib.get_close_matches(key, options, n=1, cutoff=0.75):
            raise ConfigError(f"unknown key: {key}\nhint: {near}")


def _is_config(word: str) -> bool:
    path = Path(word).expanduser()
    if path.suffix not in _CONFIGS or path.is_dir():
        return False
    if not path.is_file():
        raise ConfigError(f"no such config file: {word}\nhint: {near_file(path)}")
    return True


def _named(first: Mapping[str, Any], said: Mapping[str, Any], usage: str) -> str:
    """What is meant where no RUN stands: the result of a run, an adapter, a model.

    ``first``: the keys whose output_dir may be the run's; one that is said beside a config file is
    where something new goes.
    """
    folder = _value(first, "output_dir")
    if folder is not None and has_result(Path(str(folder)).expanduser()):
        return str(folder)
    for key in ("adapter_name_or_path", "model_name_or_path"):
        found = _value(said, key)
        if found is not None:
            return str(found)
    raise ConfigError(f"no RUN is given\nhint: {usage}")


def _value(said: Mapping[str, Any], field: str) -> Any:
    return next((value for key, value in said.items() if keys.ALIASES.get(key, key) == field), None)


def _canonical(file: Mapping[str, Any]) -> dict[str, Any]:
    """A config file's keys, the two that are always there under our names."""
    always = ("model_name_or_path", "dataset")
    return {
        keys.ALIASES.get(key, key) if keys.ALIASES.get(key, key) in always else key: value
        for key, value in file.items()
        if value is not None
    }


def _targets(said: Mapping[str, Any]) -> set[str]:
    """The fields that keys set."""
    found: set[str] = set()
    for key in said:
        found.update(keys.DERIVED.get(key, (keys.ALIASES.get(key, key),)))
    return found & FIELDS
