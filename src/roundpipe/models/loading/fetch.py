"""A model's folder and its config: from a local folder or the model hub; no code of it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import check_folder, config_fields, own_code
from roundpipe.models.loading.hub import fetch_weights, open_snapshot

if TYPE_CHECKING:
    from roundpipe.models.loading.shards import Shards

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SIXTEEN_OR_MORE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fetch(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: the given one, or the hub's files, fetched where they are not at hand.

    Of a repository only what lies at its top is fetched: weights, configs, tokenizer. Raises
    ConfigError where it cannot be had, PlanError where the disk has no room for it.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if not _ID.fullmatch(str(name_or_path)):
        raise ConfigError(
            f"no such folder, and not an id of the model hub: {name_or_path}\n"
            "hint: give a folder that exists, or an id such as owner/name"
        )
    snapshot = open_snapshot(str(name_or_path), revision)
    fetch_weights(snapshot)
    return snapshot.folder


def read_config(folder: Path) -> Any:
    """The transformers config of a folder; raises ConfigError where there is none that works.

    Also for what no file may say: see `roundpipe.models.loading.distrust`.
    """
    from transformers import AutoConfig  # noqa: PLC0415 (imports late)

    fields = config_fields(folder)
    check_folder(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a validator of one of 400 classes raises
        raise ConfigError(_why_no_config(folder, fields, error)) from error


def _why_no_config(folder: Path, fields: dict[str, Any], error: Exception) -> str:
    import transformers  # noqa: PLC0415 (imports late)

    kind, code = fields.get("model_type"), own_code(fields)
    if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING:
        return (
            f"its config cannot be read: {folder / 'config.json'}: {reason(error)}\n"
            "hint: fetch it again, or update transformers"
        )
    version = transformers.__version__
    if code is not None:
        return (
            f"a model of its own code, which is never run: {folder}: {code}\n"
            f"hint: transformers {version} has no {kind}; pip install -U transformers may bring it"
        )
    if "diffusers" in " ".join(map(str, fields)):
        return f"not a language model, but a part of one that makes images: {folder}\nhint: " + (
            "give a causal language model"
        )
    if not kind:
        return (
            f"its config has no model_type: {folder / 'config.json'}\n"
            "hint: a model folder is one that save_pretrained of transformers wrote"
        )
    return (
        f"transformers {version} does not know this type of model: {kind}: {folder}\n"
        "hint: pip install -U transformers may bring it"
    )


def choose_dtype(asked: str | torch.dtype, config: Any, shards: Shards) -> torch.dtype:
    """The dtype to load in; "auto": what the config says, else the files' first float dtype."""
    found: Any = asked
    if asked == "auto":
        found = getattr(config, "dtype", None)
        if found is None:
            dtypes = [tensor.dtype for _, tensor in sorted(shards.tensors.items())]
            found = next((d for d in dtypes if d in _SIXTEEN_OR_MORE), torch.float32)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if found not in _SIXTEEN_OR_MORE:
        told = asked if found is None else found
        raise ConfigError(f"dtype: not one to load a model in: {told}\nhint: dtype=bfloat16")
    dtype: torch.dtype = found
    return dtype


def reason(error: Exception) -> str:
    """The first line of what another library says, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
