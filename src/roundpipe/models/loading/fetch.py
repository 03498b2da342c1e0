"""A model's folder and its config: from a local folder or the model hub; no code of it is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from roundpipe.models.loading.shards import Shards

_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_SIXTEEN_OR_MORE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fetch(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: the given one, or the hub's files, fetched where they are not at hand.

    Of a repository only what lies at its top is fetched: weights, configs, tokenizer. Raises
    ConfigError where it cannot be had.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (imports late)
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                str(name_or_path),
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except HFValidationError as error:
        raise ConfigError(
            f"no such folder, and not an id of the model hub: {name_or_path}\n"
            "hint: give a folder that exists, or an id such as owner/name"
        ) from error
    except Exception as error:  # of httpx, huggingface_hub, the file system
        raise ConfigError(
            f"cannot fetch the model: {name_or_path}: {type(error).__name__}: {reason(error)}\n"
            "hint: check the spelling and the network, log in with: hf auth login; or give a folder"
        ) from error


def read_config(folder: Path) -> Any:
    """The transformers config of a folder; raises ConfigError where there is none that works."""
    from transformers import AutoConfig  # noqa: PLC0415 (imports late)

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"no config.json in: {folder}\n"
            "hint: a model folder is one that save_pretrained of transformers wrote"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a validator of one of 400 classes raises
        raise ConfigError(
            f"its config cannot be read: {folder / 'config.json'}: {reason(error)}\n"
            "hint: files that bring code of their own are never run; update transformers"
        ) from error


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
